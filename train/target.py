"""Job `target`: a tokenized corpus in; a Llama-shaped language model trained from scratch out.

    deepspeed train/target.py --recipe recipes/paper-owt.yaml

For the source paper's 12-layer, 16-head target, and for small runs on any text file. The model is a stock Hugging
Face folder below `out`/target, which the other jobs take as `target.name`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.blocks import TokenBlocks
from draftsmith.data.io import atomic_dir
from draftsmith.data.packing import Batch
from draftsmith.data.vocabulary import tokenizer_hash
from draftsmith.decode.device import training_dtype
from draftsmith.distill.attention import NAME, through_layer
from draftsmith.distill.losses import headed_loss
from draftsmith.train.batches import CorpusBatches, MicroBatch
from draftsmith.train.flops import shape_of
from draftsmith.train.loop import Settings, ensure_distributed, fit
from draftsmith.train.prepare import load_tokenizer
from draftsmith.train.recipe import parse_args
from draftsmith.train.sections import PretrainSection
from draftsmith.train.stage import inputs_hash, is_done, local_device, mark_done, own_folder, run_job, say
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM


def make_model(p: PretrainSection, tokenizer: Any, seed: int) -> LlamaForCausalLM:
    """A model of the recipe's shape, embedding and head tied, its vocabulary padded to a multiple of 64."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=p.hidden, intermediate_size=p.intermediate,
        num_hidden_layers=p.layers, num_attention_heads=p.heads, num_key_value_heads=p.kv_heads or p.heads,
        max_position_embeddings=p.block, tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(NAME)
    # As GPT-2: what is added to the residual stream starts smaller the more layers add to it.
    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            nn.init.normal_(linear.weight, std=config.initializer_range / math.sqrt(2 * p.layers))
    return model


class PretrainModule(nn.Module):
    """Sum of the next tokens' cross-entropies over a micro-batch."""

    def __init__(self, model: LlamaForCausalLM, p: PretrainSection) -> None:
        super().__init__()
        self.body, self.p, self.dtype = model.model, p, training_dtype(p.precision, local_device())
        self.size = shape_of(model.config)

    def forward(self, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        batch, device = micro.batch, self.body.norm.weight.device
        ids, rows = batch.ids_BT.to(device), batch.row_index_R.to(device)
        labels = ids.flatten()[(rows + 1).clamp_max(ids.numel() - 1)]

        def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return F.cross_entropy(logits, labels, reduction="none"), (logits.argmax(-1) == labels).float()

        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            hidden = self._hidden(ids, batch, device)
            # The head is the embedding, tied.
            loss, right = headed_loss(cross_entropy, hidden.flatten(0, 1)[rows], self.body.embed_tokens.weight, labels)
        parts = {"accuracy": (right.sum(), len(right)), "tokens": (torch.tensor(float(ids.numel())), 1),
                 "flops": (self.size.flops(ids.numel(), len(rows), True), 1)}
        return loss.sum(), parts

    def _hidden(self, ids: torch.Tensor, batch: Batch, device: torch.device) -> torch.Tensor:
        x = self.body.embed_tokens(ids)
        position = batch.position_BT.to(device)
        seen: dict[str, Any] = {"position_embeddings": self.body.rotary_emb(x, position), "position_ids": position,
                                **batch.seen(device)}
        for layer in self.body.layers:
            x = through_layer(partial(layer, **seen), x, self.p.recompute and self.training)
        hidden: torch.Tensor = self.body.norm(x)
        return hidden


def heldout_loss(module: PretrainModule, batches: CorpusBatches, blocks: TokenBlocks) -> float:
    """Mean cross-entropy over the blocks that are never trained on."""
    loss = rows = 0.0
    module.eval()
    with torch.no_grad():
        for number in range(batches.each_epoch, len(blocks)):
            batch = blocks.batch([number])
            loss += float(module(MicroBatch(batch, 0, 0))[0])
            rows += len(batch.row_index_R)
    module.train()
    return loss / max(1.0, rows)


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    recipe, p = args.recipe, args.recipe.pretrain
    if p is None:
        raise DraftsmithError(f"{args.recipe_path}: has no section 'pretrain', which says what target to train")
    tokenizer = load_tokenizer(p.tokenizer, recipe.target.trust_remote_code)
    blocks = TokenBlocks(recipe.blocks_dir, p.block, tokenizer_hash(tokenizer))
    hashes = [shard["files"]["tokens"]["sha256"] for shard in blocks.manifest.shards]
    inputs = inputs_hash(recipe, ["pretrain"], exclude={"save_every", "eval_every"}, corpus=hashes)
    if is_done(recipe.target_dir / "stage.json", inputs):
        say(f"target: {recipe.target_dir} is up to date, nothing to do")
        return
    ensure_distributed()
    own_folder(recipe)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = make_model(p, tokenizer, recipe.seed)
    batches = CorpusBatches(blocks, p, recipe.seed, rank, world, p.heldout_blocks)
    module = PretrainModule(model, p)
    say(f"target: {sum(w.numel() for w in module.parameters()) / 1e6:.1f} M weights; {p.steps} steps of "
        f"{batches.per_step} blocks, {p.steps * batches.per_step / batches.each_epoch:.2f} epochs")
    settings = Settings("target", p.steps, p.lr, p.warmup, p.final_lr, p.betas, p.weight_decay, p.clip, p.accumulation,
                        p.zero_stage, p.save_every, p.max_skipped)

    def evaluate(step: int) -> dict[str, float]:
        found = heldout_loss(module, batches, blocks)
        say(f"target: step {step}: held-out loss {found:.4f}")
        return {"heldout/loss": found}

    def rows(micro: MicroBatch) -> int:
        return len(micro.batch.row_index_R)

    # Another number of ranks may go on with the same blocks a step.
    resumable = inputs_hash(recipe, ["pretrain"], corpus=hashes, per_step=batches.per_step,
                            exclude={"save_every", "eval_every", "micro_batch", "accumulation"})
    fit(module, batches, rows, settings, recipe.folder, resumable, p.micro_batch, evaluate, p.eval_every,
        emptied=MicroBatch.emptied)
    if rank == 0:
        model.cpu().set_attn_implementation("sdpa")
        with atomic_dir(recipe.target_dir) as aside:
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            mark_done(aside / "stage.json", inputs)
        say(f"target: written to {recipe.target_dir}")


if __name__ == "__main__":
    run_job(main, "target")
