"""The papers' own architectures: ``import vitrim.models`` registers them with timm, for ``timm.create_model``.

``import vitrim`` alone does not, because it imports neither torch nor timm. The command line imports them all.
"""

from vitrim.models import lookupvit as lookupvit
from vitrim.models import lv_vit as lv_vit
from vitrim.models import rev_vit as rev_vit
from vitrim.models import t2t_vit as t2t_vit
from vitrim.models import vittm as vittm
from vitrim.models import vittm_mae as vittm_mae
