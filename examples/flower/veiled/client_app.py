"""What a node runs. Mods of your own go into the list."""

from gradveil.federated.flower import client_app

app = client_app(mods=[])
