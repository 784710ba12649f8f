"""The loss over a vocabulary of 128k at B = 4, T = 1024, forward and backward, under 3 GiB.

The logits alone would be 2 GiB in float32, and a loss that keeps them, their log-softmax and both gradients
four times that. Measured as the peak of a fresh process over what it held before the loss.
"""

from __future__ import annotations

import json
import subprocess
import sys

from _verdict import ROOT, conclude

ROWS, VOCAB, HIDDEN, TOP, BAR = 4 * 1024, 128 * 1024, 1024, 16, 3.0

CHILD = """
import json, re, sys
import torch
from draftsmith.distill.losses import forward_kl, headed_loss, sparse_events
rows, vocab, hidden, top, whole = json.loads(sys.argv[1])
def held(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) / 2**20
generator = torch.Generator().manual_seed(0)
x = torch.randn(rows, hidden, generator=generator).requires_grad_()
head = torch.randn(vocab, hidden, generator=generator) / hidden**0.5
ids = torch.randint(0, vocab, (rows, top), generator=generator).sort(-1).values
ids = ids + torch.arange(top)  # of a row all different
ids = ids.clamp_max(vocab - 1)
logp, tail = torch.full((rows, top), -3.0), torch.full((rows,), 0.2)
def loss(logits, ids, logp, tail):
    events = sparse_events(logits, ids, logp, tail, 0.5)
    return forward_kl(events), events.acceptance()
before = held("VmRSS")
with torch.autocast("cpu", torch.bfloat16):
    value = (loss(x @ head.T, ids, logp, tail) if whole else headed_loss(loss, x, head, ids, logp, tail))[0]
value.sum().backward()
print(json.dumps([held("VmHWM") - before, float(value.mean()), float(x.grad.norm())]))
"""


def measure(whole: bool, rows: int = ROWS) -> tuple[float, float, float]:
    """GiB of the loss on top of its inputs, the mean loss, and the norm of its gradient."""
    done = subprocess.run([sys.executable, "-c", CHILD, json.dumps([rows, VOCAB, HIDDEN, TOP, whole])],
                          capture_output=True, text=True, check=True, cwd=ROOT)
    gib, value, norm = json.loads(done.stdout)
    return gib, value, norm


def main() -> None:
    ours, _, _ = measure(False)
    # The plain loss at an eighth of the rows: the whole of it does not fit small machines.
    some, plain = measure(False, ROWS // 8), measure(True, ROWS // 8)
    apart = max(abs(a - b) / abs(b) for a, b in zip(some[1:], plain[1:], strict=True))
    conclude("memory", ours < BAR and apart < 1e-2,
             f"loss and gradient of {ROWS} rows over {VOCAB} tokens take {ours:.2f} GiB (bar {BAR:g}); of {ROWS // 8} "
             f"rows {some[0]:.2f} GiB, with all logits in memory {plain[0]:.2f}, loss and gradient norm {apart:.0e} "
             "apart", gib=ours, some_gib=some[0], plain_gib=plain[0], apart=apart)


if __name__ == "__main__":
    main()
