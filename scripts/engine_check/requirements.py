"""Prints what an installed wheel requires, without extras and without the packages named: requirements.py DISTRIBUTION [PACKAGE...]"""

import re
import sys
from importlib import metadata

left_out = {name.lower().replace("_", "-") for name in sys.argv[2:]}
for requirement in metadata.requires(sys.argv[1]) or []:
    name = re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")
    if "extra ==" not in requirement and name not in left_out:
        print(requirement)
