import sys

from ds_compress.cli import main

sys.exit(main())
