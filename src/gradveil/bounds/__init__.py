"""What no attack can pass: ceilings that follow from a bound on one example's influence, and from noise."""

from gradveil.bounds.ceiling import Ceiling as Ceiling
from gradveil.bounds.ceiling import Proof as Proof
from gradveil.bounds.ceiling import Release as Release
from gradveil.bounds.ceiling import best_psnr as best_psnr
from gradveil.bounds.ceiling import ceiling as ceiling
from gradveil.bounds.ceiling import prove as prove
from gradveil.bounds.ceiling import release_of as release_of
from gradveil.bounds.certificate import Certificate as Certificate
from gradveil.bounds.certificate import certificate as certificate
