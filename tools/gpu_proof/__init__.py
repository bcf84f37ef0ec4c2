"""Verify the PyTorch apps on one device, with one rank and with several ranks, and write the results to a JSON file.

    PYTHON=python3 bash tools/gpu_proof.sh --output gpu_proof.json --mnist DIR     # one NVIDIA GPU, NCCL
    PYTHON=python3 bash tools/gpu_proof.sh --device cpu                            # the same rows over gloo
    PYTHON=python3 bash tools/gpu_proof.sh --device cpu --quick                    # fewer rows and steps

The interpreter needs the packages that the apps pin; other versions cause a warning. DIR has MNIST's four files. The
outcome of a row is `passed`, `failed` with the reason, or `not run` with the reason. In rows with several ranks, the
ranks share the GPU (--share-gpu), so the times of these rows do not apply to several GPUs.

- all-reduce: The result of an all-reduce over several ranks is the right sum. These rows run first.
- bits: With --virtual-ranks 4, the weights have the same bits at 1, 2, 3 and 4 ranks, and after a kill at 3 ranks.
- killed: A rank gets SIGKILL while the other ranks wait in an all-reduce. The other ranks end, and the job resumes. The
  final weights are bitwise equal to the weights of an undisturbed run.
- stopped: The launch script gets SIGTERM. The ranks save the step, the exit code is 143, and the job resumes. The final
  weights are bitwise equal to the weights of an undisturbed run.
- same step: With dropout (and, in cifar_ddp, augmentation), losses in float64 are the same at 1, 2 and 3 ranks, within
  1e-12.
- hang: A rank gets SIGSTOP. The report shows the rank, the rank's line, and the collective in which other ranks wait.
- sharded: gpt_fsdp has the same losses at four meshes, within 1e-12, and resumes a checkpoint at another mesh.
- elastic: A rank of mnist_elastic is killed, and its successor rejoins. The weights are bitwise equal to the weights of
  a run with one rank.
- kit: A loop uses samestep.torch without an app. Losses in float64 are the same at 1, 2 and 3 ranks, within 1e-12. A
  killed and resumed job has the same weights as an undisturbed job.
- losses: The first losses on the device equal the losses on the CPU, within a tolerance.
- recovery: After SIGKILL, a restart, SIGTERM and a resume, the weights are bitwise equal to the weights of an
  undisturbed run.
- collectives: In collectives_lab, the result of each collective equals its definition.
- accuracy: The row measures the seconds until mnist_ddp reaches 99% accuracy on MNIST's test set.
- finetune: The row checks the bits and the losses (in bfloat16) of llm_finetune, and measures tokens per second.
- speed: The rows measure samples per second of mnist_ddp and a baseline loop, and steps per second of cifar_ddp.

Rows that measure no time run in parallel, with up to --jobs ranks. A job that hangs ends after --job-limit seconds
(times a factor of its row), and all rows end after --limit seconds.
"""
