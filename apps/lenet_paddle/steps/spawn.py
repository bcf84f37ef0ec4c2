"""Train LeNet on MNIST on several ranks, which `paddle.distributed.spawn` starts."""

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle.vision.transforms import ToTensor
from samestep.data.datasets import EMBEDDED  # 5,000 images; without file names, Paddle downloads all 70,000

FILES = f"{EMBEDDED}/train-images-idx3-ubyte.gz", f"{EMBEDDED}/train-labels-idx1-ubyte.gz"
train_dataset = paddle.vision.datasets.MNIST(*FILES, mode="train", transform=ToTensor())


def train() -> None:
    """Train for one epoch."""
    dist.init_parallel_env()
    paddle.seed(1)
    # The sampler shuffles equally on all ranks, and gives each rank a different part of every global batch.
    sampler = paddle.io.DistributedBatchSampler(train_dataset, batch_size=64 // dist.get_world_size(), shuffle=True)
    train_loader = paddle.io.DataLoader(train_dataset, batch_sampler=sampler)
    net = paddle.DataParallel(paddle.vision.models.LeNet())
    adam = paddle.optimizer.Adam(learning_rate=0.001, parameters=net.parameters())
    for step, (images, labels) in enumerate(train_loader, 1):
        scores = net(images)
        loss = F.cross_entropy(scores, labels)
        loss.backward()
        if step % 20 == 0:
            top1, top2 = (paddle.metric.accuracy(scores, labels, k).item() for k in (1, 2))
            print(f"step {step} - loss: {loss.item():.4f} - acc_top1: {top1:.4f} - acc_top2: {top2:.4f}")
        adam.step()
        adam.clear_grad()


if __name__ == "__main__":
    dist.spawn(train, nprocs=2)
