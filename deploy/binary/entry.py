"""What the binary runs."""

from edge_client.cli import main

main()
