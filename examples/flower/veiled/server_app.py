"""What the server runs."""

from gradveil.federated.flower import server_app

app = server_app()
