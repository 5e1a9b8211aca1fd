"""examples/pretrain.py with FSDP2 on CPU processes, for test_distributed.py only.

Accelerate knows FSDP on accelerators only: with the type MULTI_CPU it trains as DDP, without a word. Nothing else in it
depends on the type, so here it is told another one.
"""

from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from tests.helpers.examples import load_example


pretrain = load_example("pretrain")


class ShardedTrainer(pretrain.MLMTrainer):
    def __init__(self, *args, **kwargs):
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().__init__(*args, **kwargs)

    def evaluate(self, *args, **kwargs):
        sharded = sum(isinstance(weight, DTensor) for weight in self.model.parameters())
        print(f"{sharded} of {len(list(self.model.parameters()))} parameters are sharded", flush=True)
        return super().evaluate(*args, **kwargs)


def main(args: list[str]) -> None:
    pretrain.MLMTrainer = ShardedTrainer
    pretrain.main(args)
