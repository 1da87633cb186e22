"""What a node runs. Mods of your own go into the list.

What stands here holds for nodes whose own config says nothing else: what they train on, and how they are defended.
"""

from gradveil.federated.flower import client_app

app = client_app(mods=[], data="mnist-samples", defense="clip:bound=1,per=global+noise:sigma=0.001")
