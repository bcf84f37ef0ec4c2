"""Test that the Kubernetes manifests follow the published schemas and meet the needs of the programs in the pods."""

from __future__ import annotations

import copy
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from kubeflow_trainer_api import models
from processes import free_port
from samestep.options import Parser, add_common

REPOSITORY = Path(__file__).resolve().parents[2]
OVERLAYS = ["cpu", "gpu"]
KUBERNETES = "1.37"  # kubernetes-validate has the API schemas of this version
STOPPED = {128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)}
Manifest = dict[str, Any]
Render = Callable[[str], list[Manifest]]

# The fields of an MPIJob in kubeflow/mpi-operator v0.8.0 (pkg/apis/kubeflow/v2beta1/types.go). The pod templates have
# the schema of Kubernetes.
WHOLE = {"type": "integer", "minimum": 0}


def fields(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def one_of(*values: str) -> dict[str, Any]:
    return {"enum": [*values]}


REPLICAS = fields(
    replicas=WHOLE,
    restartPolicy=one_of("Never", "OnFailure"),
    template={"type": "object"},
)
MPI_JOB = fields(
    "spec",
    apiVersion=one_of("kubeflow.org/v2beta1"),
    kind=one_of("MPIJob"),
    metadata={"type": "object"},
    spec=fields(
        "mpiReplicaSpecs",
        slotsPerWorker=WHOLE,
        runLauncherAsWorker={"type": "boolean"},
        sshAuthMountPath={"type": "string"},
        launcherCreationPolicy=one_of("AtStartup", "WaitForWorkersReady"),
        mpiImplementation=one_of("OpenMPI", "Intel", "MPICH"),
        mpiReplicaSpecs=fields("Launcher", Launcher=REPLICAS, Worker=REPLICAS),
        runPolicy=fields(
            cleanPodPolicy=one_of("None", "Running", "All"),
            ttlSecondsAfterFinished=WHOLE,
            activeDeadlineSeconds=WHOLE,
            backoffLimit=WHOLE,
            schedulingPolicy={"type": "object"},
            suspend={"type": "boolean"},
            managedBy={"type": "string"},
        ),
    ),
)


def check(manifest: Manifest) -> None:
    """Raise an error if a manifest has a field that is not in its schema, or lacks a required field."""
    kind = manifest["kind"]
    if manifest["apiVersion"] == "trainer.kubeflow.org/v1alpha1":
        model = getattr(models, f"TrainerV1alpha1{kind}")
        read = model.from_dict(manifest).to_dict()
        if read != manifest:  # the models ignore unknown fields
            raise ValueError(f"{kind} has unknown fields: {manifest} is read as {read}")
        for job in jobs_of_runtime(manifest):
            check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, "spec": job["template"]["spec"]})
    elif kind == "MPIJob":
        jsonschema.validate(manifest, MPI_JOB)
        for replicas in manifest["spec"]["mpiReplicaSpecs"].values():
            # Check a PodTemplate, not a Job: the operator adds the restart policy that a Job's template must have.
            template = copy.deepcopy(replicas["template"])
            check({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": template})
    else:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def jobs_of_runtime(manifest: Manifest) -> list[Manifest]:
    found: list[Manifest] = (
        manifest["spec"]["template"]["spec"]["replicatedJobs"] if "template" in manifest["spec"] else []
    )
    return found


def templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield every pod template with the name of its owner."""
    for manifest in manifests:
        name = f"{manifest['kind']} {manifest['metadata']['name']}"
        spec = manifest["spec"]
        if manifest["kind"] == "Job":
            yield name, spec["template"]
        elif manifest["kind"] == "TrainingRuntime":
            for job in jobs_of_runtime(manifest):
                yield name, job["template"]["spec"]["template"]
        elif manifest["kind"] == "MPIJob":
            for role, replicas in spec["mpiReplicaSpecs"].items():
                yield f"{name} {role}", replicas["template"]


def by_name(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def default_grace() -> float:
    parser = Parser()
    add_common(parser, epochs=1, global_batch_size=1, lr="", datasets=("mnist",), devices=("auto",))
    return float(parser.get_default("grace"))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_manifest_is_what_its_schema_allows(overlay: str, render: Render) -> None:
    kinds = set()
    for manifest in render(overlay):
        check(manifest)
        kinds.add(manifest["kind"])
    policies = {"NetworkPolicy"} if overlay == "cpu" else set()
    assert kinds == {"PersistentVolumeClaim", "TrainingRuntime", "TrainJob", "MPIJob", "Service", "Job"} | policies


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("PersistentVolumeClaim", "spec"),
        ("Service", "spec"),
        ("NetworkPolicy", "spec"),
        ("Job", "spec podFailurePolicy"),
        ("Job", "spec template spec containers 0 securityContext"),
        ("TrainJob", "spec trainer"),
        ("TrainingRuntime", "spec mlPolicy"),
        ("TrainingRuntime", "spec template spec replicatedJobs 0 template spec podFailurePolicy"),
        ("TrainingRuntime", "spec template spec replicatedJobs 0 template spec template spec containers 0"),
        ("MPIJob", "spec runPolicy"),
        ("MPIJob", "spec mpiReplicaSpecs Worker"),
        ("MPIJob", "spec mpiReplicaSpecs Worker template spec containers 0 lifecycle"),
    ],
)
def test_an_unknown_field_is_refused(kind: str, path: str, render: Render) -> None:
    manifest = copy.deepcopy(next(each for each in render("cpu") if each["kind"] == kind))
    place: Any = manifest
    for word in path.split():
        place = place[int(word) if word.isdigit() else word]
    place["nodeCount"] = 1
    with pytest.raises((ValueError, jsonschema.ValidationError)):
        check(manifest)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_is_root_and_each_has_time_to_save(overlay: str, render: Render) -> None:
    manifests = render(overlay)
    claims = set(by_name(manifests, "PersistentVolumeClaim"))
    for name, template in templates(manifests):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 1000, name
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert {
            each["persistentVolumeClaim"]["claimName"] for each in volumes.values() if "emptyDir" not in each
        } <= claims
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"], name
            assert not container["securityContext"]["allowPrivilegeEscalation"], name
            mounts = {each["name"]: each for each in container["volumeMounts"]}
            assert mounts.keys() == volumes.keys(), name
            assert "emptyDir" in volumes["tmp"], name
            if "runs" in mounts:  # this pod runs ranks
                assert pod["terminationGracePeriodSeconds"] > default_grace() + 10, name
                assert mounts["data"]["readOnly"], name
                assert mounts["shm"]["mountPath"] == "/dev/shm", name
                gpus = container["resources"]["limits"].get("nvidia.com/gpu")
                assert gpus == {"cpu": None, "gpu": "2"}[overlay], name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_are_those_that_are_built_and_hold_what_is_started(overlay: str, render: Render) -> None:
    manifests = render(overlay)
    runtimes = dict(templates(manifests))
    started = [
        (container["image"], container) for _, pod in templates(manifests) for container in pod["spec"]["containers"]
    ]
    for job in by_name(manifests, "TrainJob").values():
        runtime = runtimes[f"TrainingRuntime {job['spec']['runtimeRef']['name']}"]["spec"]["containers"][0]
        started.append((job["spec"]["trainer"].get("image", runtime["image"]), job["spec"]["trainer"]))
    for image, container in started:
        name, tag = re.fullmatch(r"samestep/(\w+):(\w+)", image).groups()  # type: ignore[union-attr]
        assert tag == overlay
        dockerfile = (REPOSITORY / "deploy" / "images" / f"Dockerfile.{name}").read_text()
        words = " ".join([*container.get("command", []), *container.get("args", [])])
        for app in re.findall(r"/samestep/scripts/run_(\w+)\.sh|/samestep/apps/(\w+)/", words):
            assert f"COPY apps/{app[0] or app[1]} /samestep/apps/" in dockerfile
        for path in re.findall(r"/etc/ssh/\S+", words):
            assert path in dockerfile


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_exit_codes_decide_whether_a_pod_is_started_again(overlay: str, render: Render) -> None:
    """Code 2 means a user's mistake. Code 128 + n means that signal n stopped the job, which saved its step."""
    jobs = [each["spec"] for each in by_name(render(overlay), "Job").values()]
    for runtime in by_name(render(overlay), "TrainingRuntime").values():
        jobs += [job["template"]["spec"] for job in jobs_of_runtime(runtime)]
    assert len(jobs) == {"cpu": 4, "gpu": 2}[overlay]
    for job in jobs:
        assert job["template"]["spec"]["restartPolicy"] == "Never"  # a podFailurePolicy requires "Never"
        assert job["backoffLimit"] > 0
        rules = job["podFailurePolicy"]["rules"]
        containers = {each["name"] for each in job["template"]["spec"]["containers"]}
        assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == containers
        codes = {rule["action"]: set(rule["onExitCodes"]["values"]) for rule in rules if "onExitCodes" in rule}
        assert codes == {"FailJob": {2}, "Ignore": STOPPED}
        assert [rule["action"] for rule in rules if "onPodConditions" in rule] == ["Ignore"]


def test_only_its_own_pods_reach_a_job_whose_ports_have_no_authentication(render: Render) -> None:
    """The ports of mnist_elastic have no authentication. All pods of its job have the label job-name."""
    policy = by_name(render("cpu"), "NetworkPolicy")["mnist-elastic"]["spec"]
    pods = {"matchLabels": {"job-name": "mnist-elastic"}}
    ingress = [{"from": [{"podSelector": pods}]}]
    assert policy == {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress}
    assert by_name(render("cpu"), "Job")["mnist-elastic"]["spec"]["successPolicy"]["rules"] == [
        {"succeededIndexes": "0"}
    ]


def test_the_launch_scripts_understand_each_pod(render: Render) -> None:
    """Run each pod's command with --dry-run and the variables that the controller sets."""
    manifests = render("cpu")
    seen = set()
    for job in by_name(manifests, "Job").values():
        spec = job["spec"]
        service = by_name(manifests, "Service")[job["spec"]["template"]["spec"]["subdomain"]]
        name = job["metadata"]["name"]
        container = spec["template"]["spec"]["containers"][0]
        variables = environment(container)
        assert spec["completionMode"] == "Indexed"
        assert spec["parallelism"] == spec["completions"] == int(variables["NNODES"])
        assert variables["MASTER_ADDR"] == f"{name}-0.{service['metadata']['name']}"  # the name of pod 0 in the Service
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"]
        assert service["spec"]["selector"] == {"job-name": name}
        for index in range(spec["completions"]):
            shown = dry_run(
                [*container["command"], *container["args"]], {**variables, "JOB_COMPLETION_INDEX": str(index)}
            )
            assert re.search(rf"--(node_)?rank={index}\b|launcher\.py 2 4 {index} ", shown), shown
            assert f"{variables['MASTER_ADDR']}" in shown
            seen.add(name)
    runtime = by_name(manifests, "TrainingRuntime")
    for name, job in by_name(manifests, "TrainJob").items():
        trainer = job["spec"]["trainer"]
        container = next(templates([runtime[job["spec"]["runtimeRef"]["name"]]]))[1]
        variables = environment(container["spec"]["containers"][0])
        nodes = trainer["numNodes"]
        for index in range(nodes):
            sets = {  # Kubeflow Trainer
                "PET_NNODES": str(nodes),
                "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
                "PET_NODE_RANK": str(index),
                "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
                "PET_MASTER_PORT": "29400",
            }
            shown = dry_run([*trainer["command"], *trainer["args"]], {**variables, **sets})
            assert f"--nnodes={nodes} --node-rank={index} --nproc-per-node={trainer['numProcPerNode']}" in shown, shown
            assert f"--master-addr={sets['PET_MASTER_ADDR'] if nodes > 1 else '127.0.0.1'}" in shown, shown
            seen.add(name)
    (horovod,) = by_name(manifests, "MPIJob").values()
    spec = horovod["spec"]
    (container,) = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    ranks = spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    train = container["args"].index("/samestep/apps/mnist_horovod/train.py")
    assert container["args"][container["args"].index("--np") + 1] == str(ranks)
    dry_run(["bash", "/samestep/scripts/run_mnist_horovod.sh", str(ranks), *container["args"][train + 1 :]], {})
    seen.add("mnist-horovod")
    images = "".join(path.read_text() for path in (REPOSITORY / "deploy" / "images").glob("Dockerfile.*"))
    in_images = {
        path.parent.name for path in REPOSITORY.glob("apps/*/options.py") if f"apps/{path.parent.name} " in images
    }
    assert len(in_images) > 6
    assert seen == {name.replace("_", "-") for name in in_images}


def environment(container: Manifest) -> dict[str, str]:
    """Return a container's environment variables. The container must get its secret from a Kubernetes Secret."""
    secrets = [each for each in container["env"] if "valueFrom" in each]
    assert [each["name"] for each in secrets] == ["SAMESTEP_SECRET"]
    reference = secrets[0]["valueFrom"]["secretKeyRef"]
    page = (REPOSITORY / "deploy" / "kubernetes" / "README.md").read_text()
    assert f"kubectl create secret generic {reference['name']} --from-file={reference['key']}=job.secret" in page
    return {each["name"]: each.get("value", "of the Secret") for each in container["env"]}


def dry_run(command: list[str], variables: dict[str, str]) -> str:
    """Return the launcher's command that the launch script prints with --dry-run and only these variables."""
    words = [word.replace("/samestep", str(REPOSITORY)) for word in command]
    port = free_port()  # the port of machine 0; any free port works here
    ports = {name: port for name in variables if name.endswith("MASTER_PORT")}
    environ = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, **variables, **ports}
    done = subprocess.run([*words, "--dry-run"], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), (shlex.join(words), done.stderr)
    return done.stdout
