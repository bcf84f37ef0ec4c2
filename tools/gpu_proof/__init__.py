"""Prove the PyTorch apps on one device, with one rank and with several, and write the results to one JSON file.

    PYTHON=python3 bash tools/gpu_proof.sh --output gpu_proof.json --mnist DIR     # one NVIDIA GPU, NCCL
    PYTHON=python3 bash tools/gpu_proof.sh --device cpu                            # the same rows over gloo
    PYTHON=python3 bash tools/gpu_proof.sh --device cpu --quick                    # the same in short

The interpreter needs what the apps pin (other versions are a warning) and no package index. DIR holds MNIST's four
files. Each row ends with `passed`, `failed` with the reason, or `not run` with the reason; only `passed` is a pass.
Several ranks share the GPU by --share-gpu: times of such rows say nothing about several GPUs.

- all-reduce: Several ranks communicate at all. It runs first.
- bits: With --virtual-ranks 4 the weights have the same bits at 1, 2, 3 and 4 ranks, and after a kill at 3.
- killed: SIGKILL to a rank while the others wait in an all-reduce. The others end, and the job resumes to the bit.
- stopped: SIGTERM to the script. The step is saved, the exit code is 143, and the job resumes to the bit.
- same step: With dropout and augmentation, losses in float64 are the same at 1, 2 and 3 ranks.
- hang: SIGSTOP to a rank. The report names the rank, its line, and the collective in which the others wait.
- sharded: gpt_fsdp at four meshes, and a checkpoint of one mesh that another resumes.
- elastic: A rank of mnist_elastic is killed and rejoins, and the weights equal a run with one rank.
- kit: A loop with samestep.torch alone. Losses in float64 are the same at 1, 2 and 3 ranks, and weights after a kill.
- losses: The first losses on the device equal the CPU's (gloo).
- recovery: SIGKILL, a restart, SIGTERM, a resume, and the weights of an undisturbed run to the bit.
- collectives: Each collective of collectives_lab, against its definition.
- accuracy: Seconds until mnist_ddp has 99% of MNIST's test set.
- finetune: Bits of llm_finetune as in the rows bits, losses in bfloat16 as on the CPU, and tokens per second.
- speed: Samples per second of mnist_ddp beside the textbook loop, and steps per second of cifar_ddp, compiled.

Rows that measure no time run side by side, as far as there are processors. A job that hangs ends after --job-limit
seconds, and all rows end after --limit seconds.
"""
