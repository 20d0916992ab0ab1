"""Train PaddleFormers' Qwen3-MoE sharded over all ranks; started again, on any number of ranks, it goes on from the last checkpoint.

    python -m paddle.distributed.launch --nproc_per_node 2 examples/qwen3_moe.py --steps 20

The model is tiny and made from scratch, and learns Python's help topics byte by byte. For a real one, give ``Qwen3MoeConfig`` the fields of
its ``config.json``, fill the model with ``load_huggingface`` after ``fully_shard``, and feed tokens of your own.
"""

from __future__ import annotations

import argparse

import paddle
import paddle.distributed as dist
from paddleformers.trainer import get_scheduler
from paddleformers.transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from paddle_fsdp_ckpt import CheckpointManager, fully_shard
from paddle_fsdp_ckpt.demo.text import Batches, read_corpus

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20, help="train until so many steps were taken in all")
parser.add_argument("--schedule-steps", type=int, default=60, help="where the learning rate's cosine ends")
parser.add_argument("--root", default="checkpoints", help="where the checkpoints are, for all ranks")
arguments = parser.parse_args()

dist.init_parallel_env()
rank, ranks = dist.get_rank(), dist.get_world_size()
paddle.seed(1)
config = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    norm_topk_prob=True,
    max_position_embeddings=256,
    use_cache=False,
)
config.recompute, config.recompute_granularity = True, "full"
model = Qwen3MoeForCausalLM(config)
if rank == 0:
    config.save_pretrained("config")  # what `paddle-fsdp-ckpt convert --config` asks for

# As PaddleFormers' Trainer makes them: all but biases and norms decay, and their names are asked for.
decayed = {parameter.name for name, parameter in model.named_parameters() if "bias" not in name and "norm" not in name}
schedule = get_scheduler("cosine", learning_rate=3e-3, num_warmup_steps=5, num_training_steps=arguments.schedule_steps)
optimizer = paddle.optimizer.AdamW(
    schedule,
    parameters=model.parameters(),
    weight_decay=0.1,
    apply_decay_param_fun=lambda name: name in decayed,
    grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
)
fully_shard(model, optimizer=optimizer)

batches = Batches(read_corpus(), batch_size=12, length=64, seed=0)
with CheckpointManager(arguments.root, max_to_keep=2, save_every_steps=10) as checkpoints:
    start = checkpoints.restore(model=model, optimizer=optimizer) or 0
    for step in range(start + 1, arguments.steps + 1):
        inputs, labels = (paddle.to_tensor(part) for part in batches.part(step, rank, ranks))
        loss = model(input_ids=inputs, labels=labels, return_dict=True).loss
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        schedule.step()
        mean = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / ranks:.4f}", flush=True)
        if checkpoints.should_save(step) or step == arguments.steps:
            checkpoints.save(step, model=model, optimizer=optimizer)
