"""Which defense to use: short audits and short trainings of many, a search among them, and one recommendation."""

from gradveil.lab.advise.answer import Recommendation as Recommendation
from gradveil.lab.advise.answer import Trial as Trial
from gradveil.lab.advise.answer import answer as answer
from gradveil.lab.advise.page import render_advice as render_advice
from gradveil.lab.advise.question import Question as Question
from gradveil.lab.advise.search import advise as advise
