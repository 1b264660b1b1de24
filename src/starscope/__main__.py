"""`python -m starscope` is the command `starscope`."""

from starscope.cli import main

if __name__ == "__main__":
    main()
