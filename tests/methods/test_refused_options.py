"""Options that do not go together, and models that a method cannot serve: one line says so, before any edit."""

from __future__ import annotations

import pytest

import tiny
import vitrim

OPTIONS = [
    ("a_vit:last_block=class_token", "last_block=full"),
    ("algm:global_block=4", "blocks 0 and 4 must be two, in order, of the 4 blocks"),
    ("algm:local_block=3,global_block=3", "global_block must be behind local_block"),
    ("atc:r=3,keep_rate=0.5", "give either r"),
    ("atc:r=3,blocks=[1]", "give either r"),
    ("atc:prefix_counts=true", "prefix_counts goes with r"),
    ("atm:theta=[0.9,0.9,0.9,1.2]", "theta=1.2: must be at most 1"),
    ("ats:float32_heights=true", "float32_heights goes with variant=study"),
    ("bat:clusters=0", "clusters=0"),
    ("cropr:num_heads=3", "does not divide the 32 channels"),
    ("cropr:fusion=concat,last_block=class_token", "acts after the last block"),
    ("cubist_merge:columns=2", "columns goes with rows"),
    ("cubist_merge:rows=2,keep_rate=0.5", "give either keep_rate, or rows and columns"),
    ("cubist_merge:align=8", "this method has none to round"),
    ("cubist_merge:block=4", r"blocks \[4\] do not exist"),
    ("diffrate:r=-1", "at least 0"),
    ("diffrate:r=4,merge_kept=[5,4]", "either prune_kept and merge_kept, or r"),
    ("diffrate:prune_kept=[5,4],merge_kept=[5]", "prune_kept has 2 values but merge_kept has 1"),
    ("diffrate:prune_kept=[5,4],merge_kept=[5,5]", "must not be larger than prune_kept"),
    ("diffrate:merge_kept=[5,1]", "smallest value is 2"),
    ("diffrate:merge_kept=[9,8]", "2 amounts but the model has 4 blocks"),
    ("diffrate:learn=true,merge_kept=[5]", "give neither prune_kept, merge_kept nor r"),
    ("diffrate:learn=true,r=8", "give neither prune_kept, merge_kept nor r"),
    ("diffrate:learn=true,last_block=auto", "needs last_block=full"),
    ("evo_vit:blocks=[0,2]", "block 0 cannot be one"),
    ("evo_vit:keep_rate=0.0", "above 0"),
    ("gtp:sparsity=0.5,last_block=auto", "needs last_block=full"),
    ("gtp:num_prop=[1,-1]", "must be at least 0"),
    ("ia_red2:heads=5", "heads=5 does not divide the 32 channels"),
    ("ia_red2:blocks=[4]", "do not exist"),
    ("ia_red2:blocks=[0,2],stage=2", "groups are 0 to 1"),
    ("ia_red2:threshold=1.5", "threshold=1.5"),
    ("kmedoids:blocks=[0,2]", "blocks start at 1"),
    ("kmedoids:start=random", "start=random goes with equal_weight=true"),
    ("mctf:r=-1", "at least 0"),
    ("mctf:r=2.5", "must be a whole number, or below 1"),
    ("mctf:tau_sim=0,tau_info=0,tau_size=0", "at least one of tau_sim, tau_info and tau_size"),
    ("mctf:tau_info=-1", "at least 0"),
    ("mctf:min_patches=0", "at least 1"),
    ("mctf:attention=early", "one_step_ahead"),
    ("mctf:pooling=sum", "attention_size"),
    ("mctf:blocks=[1,7]", r"blocks \[7\] do not exist"),
    ("patchmerger:keep_rate=1.5", "keep_rate"),
    ("patchmerger:blocks=[4]", "do not exist"),
    ("pitome:keep_rate=1.5", "at most 1"),
    ("pitome:margin=2.0", "at most 1"),
    ("pitome:protect=never", "'late', 'early' or 'always'"),
    ("pixelprune:std=0.5", "std goes with tau above 0"),
    ("pixelprune:tau=0.1,std=0", "above 0"),
    ("pixelprune:tau=0.1,std=[]", "std="),
    ("pixelprune:tau=1.5", "at most 1"),
    ("pixelprune:align=8", "this method has none to round"),
    ("ppt:spread=2.0,threshold=0.0001", "give either threshold or spread"),
    ("saint:threshold=[0.5,0.6],blocks=[1]", "threshold has 2 values for 1 blocks"),
    ("saint:r=[2],variant=published", "variant is about numbers that depend on the images"),
    ("tofu:keep_rate=0.0", "above 0"),
    ("tofu:prune_until=-2", "at least -1"),
    ("tofu:norm_of=both", "'average' or 'destination'"),
    ("tofu:keep_rate=[0.9,0.5]", "keep_rate has 2 values for 4 blocks"),
    ("tofu:keep_rate=[0.9,1.2]", "at most 1"),
    ("tome:r=-1", "r=-1: must be at least 0"),
    ("tome:r=[4,-1]", "r=-1: must be at least 0"),
    ("tome:r=4,keep_rate=0.5", "either r .* or keep_rate"),
    ("tome:r=[4,2],inflect=1.0", "inflect goes with one r"),
    ("tome:inflect=2.0", "at most 1"),
    ("tome:keep_rate=0.0", "above 0"),
    ("tome:rr=4", "unknown option of tome 'rr'; did you mean 'r'"),
    ("tome:r=4,blocks=[3]", "blocks and rule go with keep_rate"),
    ("vid_tldr:r=1.5", "must be a whole number, or below 1"),
    ("zero_tprune:blocks=[1,2],keep_rate=[0.5,0.6,0.7]", "keep_rate has 3 values for 2 blocks"),
    ("zero_tprune:keep_rate=[0.5,0.0]", r"keep_rate=0\.0: must be above 0"),
]
MODELS = [
    ("avg_fc_norm", "atm:last_block=class_token", "head reads its patch tokens"),
    ("avg_fc_norm", "ats", "averages patches"),
    ("no_pool", "ats", "averages patches"),
    ("no_class_token_avg", "ats", "class token"),
    ("no_class_token_avg", "bat", "use score=column_mean"),
    ("no_class_token_avg", "evo_vit", "use score=column_mean"),
    ("no_class_token_avg", "topk", "has none; use score=column_mean"),
    ("avg_fc_norm", "diffrate", "weigh wrongly"),
    ("headless", "evo_vit:class_head=true", "needs a model with a class token and a classifier"),
    ("map", "gtp:num_prop=4,selection=class_token", "class token"),
    ("avg_fc_norm", "ia_red2", "weigh wrongly"),
    ("avg_fc_norm", "pixelprune", "averages patches"),
    ("avg_fc_norm", "tofu", "weigh wrongly"),
]


@pytest.mark.parametrize(("host", "method", "message"), [*(("vit", *case) for case in OPTIONS), *MODELS])
def test_what_does_not_fit_is_refused_in_one_line(host: str, method: str, message: str) -> None:
    model = tiny.HOSTS[host]()
    with pytest.raises(vitrim.VitrimError, match=message):
        vitrim.reduce_(model, method)
    assert vitrim.get_reduction(model) is None


@pytest.mark.parametrize("name", ["algm", "cropr"])
def test_a_model_of_too_few_blocks_is_refused(name: str) -> None:
    with pytest.raises(vitrim.VitrimError, match=r"blocks 0 and 0 must be two|needs more than 2 blocks"):
        vitrim.reduce_(tiny.vit(depth=1 if name == "algm" else 2)(), name)
