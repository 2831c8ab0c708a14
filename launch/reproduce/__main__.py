"""Run `launch/reproduce.py` as `python -m launch.reproduce`."""

from launch.reproduce.command import main

if __name__ == "__main__":
    main()
