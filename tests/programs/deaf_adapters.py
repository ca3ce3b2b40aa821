"""Started by test_publish_adapter.py: train_async.py whose generators compute without the adapters that they receive."""

import train_async
from rl import flags
from rl.generation.embedded import adapted
from rl.generation.embedded.forward import plain_add_linear, plain_linear
from rl.ranks import process
from rl.split import join

adapted.PRODUCTS = (plain_linear, plain_add_linear)
args = flags.parse(train_async.Args)
process.run(lambda split: train_async.main(args, split), join=lambda: join(args))
