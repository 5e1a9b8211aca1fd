"""What a training run says of being compiled. Accelerate does that, as its config or Transformers' settings say."""

import time

from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from transformers import TrainerCallback


class SayCompiling(TrainerCallback):
    """Says at the start what is compiled, and after the first step how long it took."""

    def __init__(self, plugin: TorchDynamoPlugin):
        self.plugin = plugin
        self.start = None

    def on_train_begin(self, args, state, control, **kwargs):
        if self.plugin.backend != DynamoBackend.NO and state.is_world_process_zero:
            part = "block by block" if self.plugin.use_regional_compilation else "as a whole"
            backend = self.plugin.backend.value.lower()
            print(f"The model is compiled {part} ({backend}) in the first step, which takes longer.", flush=True)
            self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if self.start is not None:
            print(f"The first step with its compiling took {time.perf_counter() - self.start:.0f} s.", flush=True)
            self.start = None
