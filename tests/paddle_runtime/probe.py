import numpy as np, paddle, paddle.distributed as dist
from paddle import nn
from paddle.nn import functional as F
from harness import this_rank
from fused_cases import *
from paddle.distributed.fsdp import fully_shard
from paddle_fsdp_ckpt.fsdp.paddle_on_cpu import paddle_runtime_on_cpu

def attrs():
    with paddle_runtime_on_cpu():
        mesh = dist.ProcessMesh([0, 1], dim_names=["dp"]); dist.auto_parallel.set_mesh(mesh)
        m = Blocks(blocks=1)
        m.head = nn.Linear(10, 1, weight_attr=paddle.ParamAttr(learning_rate=0.5, regularizer=paddle.regularizer.L2Decay(0.3), need_clip=False))
        b = m.head.weight
        out = [(b.optimize_attr, str(b.regularizer), b.need_clip, b.is_distributed, b.trainable)]
        fully_shard(m, mesh=mesh)
        b2 = m.head.weight
        out.append((b2.optimize_attr, str(b2.regularizer), b2.need_clip, b2.trainable, b is b2, b._is_initialized(), b.shape, b2._is_initialized(), b2.shape))
        return out

class Unused(Blocks):
    def __init__(self):
        super().__init__(blocks=2)
        self.spare = nn.Linear(10, 10)

def unused():
    out = []
    with paddle_runtime_on_cpu():
        mesh = dist.ProcessMesh([0, 1], dim_names=["dp"]); dist.auto_parallel.set_mesh(mesh)
        paddle.seed(1); m = Unused()
        fully_shard(m, mesh=mesh)
        opt = paddle.optimizer.SGD(0.01, parameters=m.parameters())
        from paddle.distributed.auto_parallel.fully_shard_fusion import get_fsdp_context
        for s in range(3):
            out.append(train(m, opt, s, s+1))
            out.append([(g.params_use_cnt, g.grads_use_cnt, g.params_buffer.status.name) for g in get_fsdp_context().buffer_manager.buffer_groups])
    return out

def plain_unused():
    paddle.seed(1); m = Unused()
    return train(m, paddle.optimizer.SGD(0.01, parameters=m.parameters()), 0, 3)

def accumulate(fused):
    from contextlib import nullcontext
    with paddle_runtime_on_cpu() if fused else nullcontext():
        paddle.seed(1); m = Blocks()
        if fused:
            mesh = dist.ProcessMesh([0, 1], dim_names=["dp"]); dist.auto_parallel.set_mesh(mesh)
            fully_shard(m, mesh=mesh)
        opt = paddle.optimizer.SGD(0.01, parameters=m.parameters())
        losses = []
        for s in range(3):
            for k in range(2):
                b = paddle.to_tensor(np.random.RandomState(10*s+k).randn(12, 4).astype("float32")); t = b.sum(-1, keepdim=True)
                if fused:
                    from fused_cases import _share
                    b, t = _share(b), _share(t)
                l = (m(b) - t).square().mean(); l.backward(); losses.append(np.asarray(l.numpy()).item())
            opt.step(); opt.clear_grad()
        return losses

class Tie(Blocks):
    def __init__(self):
        super().__init__(blocks=1)
        self.other = nn.Linear(4, 10, bias_attr=False)
        self.other.weight = self.embed.weight

class Norms(Blocks):
    def __init__(self):
        super().__init__(blocks=1)
        self.bn = nn.BatchNorm1D(10)

def strange(cls):
    with paddle_runtime_on_cpu():
        mesh = dist.ProcessMesh([0, 1], dim_names=["dp"]); dist.auto_parallel.set_mesh(mesh)
        m = cls(); fully_shard(m, mesh=mesh)
        try: return sorted(sharded_state_dict(m))
        except Exception as e: return repr(e)
