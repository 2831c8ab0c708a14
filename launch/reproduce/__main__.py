"""`python -m launch.reproduce` is `python launch/reproduce.py`."""

from launch.reproduce.command import main

if __name__ == "__main__":
    main()
