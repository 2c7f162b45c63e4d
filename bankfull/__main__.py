"""`python -m bankfull` is the command line."""

from bankfull.cli import main

if __name__ == "__main__":
    main()
