"""`python -m slipstream.launcher` is the `slipstream` command."""

from slipstream.launcher.cli import main

if __name__ == "__main__":
    main()
