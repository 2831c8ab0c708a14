"""Reproduce and extend the experiments of arXiv 2401.07788: `make reproduce PRESET=cpu DATA=FOLDER`.

    python launch/reproduce.py --preset cpu --data FOLDER [--jobs 4] [--seeds 0 1 2]
    python launch/reproduce.py --preset cpu --data FOLDER --only language/topk10-reuse vision/none --seed 1

FOLDER holds cifar10/{train,test}.parquet and wikitext2/{train,valid}.txt, and for the preset `paper` gpt2/
(weights) and gpt2_tokenizer/. Nothing is downloaded. Rows go to results/PRESET.jsonl, one a run; a run whose
row is there is skipped, so an interrupted grid goes on where it was. Tables and pictures of all rows are made
at the end, in results/evidence.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.reproduce.command import main

if __name__ == "__main__":
    main()
