"""Judge the checkpoints whose folders are the arguments, without torch. Print a JSON object per folder, and a last one.

The last object states which modules were imported that a quick command must not import.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from mindie_mm.doctor.stand_ins import install

SLOW = ("torch._C", "av._core", "transformers.modeling_utils")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    folders = parser.parse_args().folders
    install()
    from mindie_mm.doctor.judgement import judge

    for folder in folders:
        print(json.dumps({one.subject: asdict(one) for one in judge(folder, None, (1024, 768))}))
    print(json.dumps([name for name in SLOW if name in sys.modules]))
