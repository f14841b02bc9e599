"""`python -m control_plane.cli` is `specfleet`."""

from control_plane.cli import main

main()
