"""Train LeNet on MNIST by `paddle.Model`, in one process or on the ranks that `paddle.distributed.launch` starts."""

import paddle
import paddle.distributed as dist
from paddle.vision.transforms import ToTensor
from samestep.data.datasets import EMBEDDED  # 5,000 images; without file names, Paddle downloads all 70,000

FILES = f"{EMBEDDED}/train-images-idx3-ubyte.gz", f"{EMBEDDED}/train-labels-idx1-ubyte.gz"
TEST_FILES = f"{EMBEDDED}/t10k-images-idx3-ubyte.gz", f"{EMBEDDED}/t10k-labels-idx1-ubyte.gz"
train_dataset = paddle.vision.datasets.MNIST(*FILES, mode="train", transform=ToTensor())
test_dataset = paddle.vision.datasets.MNIST(*TEST_FILES, mode="test", transform=ToTensor())


def train() -> None:
    """Train for one epoch, and evaluate."""
    paddle.seed(1)
    model = paddle.Model(paddle.vision.models.LeNet())
    model.prepare(
        paddle.optimizer.Adam(learning_rate=0.001, parameters=model.parameters()),
        paddle.nn.CrossEntropyLoss(),
        paddle.metric.Accuracy(topk=(1, 2)),
    )
    # With `pip install visualdl`, fit(..., callbacks=[paddle.callbacks.VisualDL(log_dir="log")]) writes the curves.
    model.fit(train_dataset, epochs=1, batch_size=64 // dist.get_world_size(), log_freq=20)
    model.evaluate(test_dataset, batch_size=50, log_freq=20)


if __name__ == "__main__":
    train()
