"""`python -m strata` says where this package's files are.

usage: python -m strata --lib        the folder of libstrata.so and libstrata_mpitrampoline.so
       python -m strata --include    the folder of nccl.h and strata.h
"""

import os
import sys
from pathlib import Path


def main() -> None:
    here = Path(__file__).resolve().parent
    folders = {"--lib": here / "lib", "--include": here / "include"}
    asked = folders.get(sys.argv[1]) if len(sys.argv) == 2 else None
    if asked is None:
        sys.exit(__doc__.strip())
    given = os.environ.get("STRATA_LIBRARY")
    if sys.argv[1] == "--lib" and given and given != "auto":
        asked = Path(given).resolve().parent
    if not asked.is_dir():
        sys.exit(f"strata: {asked} is not there: the package was installed without the library; STRATA_LIBRARY names it")
    print(asked)


if __name__ == "__main__":
    main()
