"""`pagebus job submit|status|results|cancel FILE`."""

from __future__ import annotations

import argparse
from pathlib import Path

from pagebus.actors.settings import SettingsError
from pagebus.actors.settings.command_line import Commands
from pagebus.actors.settings.sources import add_arguments, add_bus_arguments, load_settings

DESCRIPTION = (
    "Push the requests of a file, in OpenAI's batch format, onto the stream of jobs, and collect the results. The "
    "batch of a file is found again by its path and beginning: the same command goes on where it was interrupted."
)


def add_jobs(commands: Commands) -> None:
    """The commands ``job`` and ``run-batch``."""
    job = commands.add(
        "job", run_jobs, help="queue the requests of a file, collect the results", description=DESCRIPTION
    )
    actions = Commands(job, "action")
    texts = {
        "submit": "push the lines of FILE that have not been pushed yet",
        "status": "what has become of the lines of FILE",
        "results": "write the results of FILE to a file, and wait until all are there",
        "cancel": "answer what is not done yet as cancelled",
    }
    for name, text in texts.items():
        action = actions.add(name, help=text, description=text)
        action.add_argument("file", type=Path, metavar="FILE", help="one request of OpenAI's batch format per line")
        action.add_argument("--batch", help="name of the batch (default: made from the file)")
        if name == "submit":
            action.add_argument("--priority", type=int, default=0, help="priority of the jobs: lower first")
        if name == "results":
            action.add_argument(
                "-o", "--output-file", type=Path, help="default: FILE with .results.jsonl for its ending"
            )
            action.add_argument("--no-wait", action="store_true", help="write the results so far, and exit")
        add_bus_arguments(action)
    run = commands.add(
        "run-batch",
        run_jobs,
        help="answer the requests of a file, with a temporary deployment or the one at --bus",
        description="Start a deployment (unless --bus names one), answer the requests of a file in OpenAI's batch "
        "format, write the results to another one, and stop.",
    )
    run.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help="requests, one per line")
    run.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="where results are written")
    add_arguments(run)


def check_output(path: Path, requests: Path) -> None:
    """Whether results can be written there, before anything is computed, and are not to replace the requests.

    Raises:
        SettingsError: they cannot.
    """
    if path.exists() and path.samefile(requests):
        raise SettingsError(f"{path}: results would replace the requests; write them to another file")
    try:
        path.open("ab").close()
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error


def check_names(arguments: argparse.Namespace) -> None:
    """Whether jobs can have such a batch and priority, before all of them are answered with an error.

    Raises:
        SettingsError: they cannot.
    """
    from pagebus.bus.streams import BATCH_NAME, MAX_JOB_PRIORITY

    batch, priority = arguments.batch, getattr(arguments, "priority", 0)
    if batch is not None and not BATCH_NAME.fullmatch(batch):
        raise SettingsError(f"--batch {batch!r}: may hold only letters, digits, '-', '_', '.' and ':', at most 128")
    if abs(priority) > MAX_JOB_PRIORITY:
        raise SettingsError(f"--priority {priority}: must be from -{MAX_JOB_PRIORITY} to {MAX_JOB_PRIORITY}")


def run_jobs(arguments: argparse.Namespace) -> int:
    """Run one of them; returns the exit code."""
    settings = load_settings(arguments)
    file = arguments.input_file if arguments.command == "run-batch" else arguments.file
    if not file.is_file():
        raise SettingsError(f"{file}: there is no such file")
    if (output := getattr(arguments, "output_file", None)) is not None:
        check_output(output, file)
    if arguments.command == "run-batch":
        from pagebus.actors.commands.jobs.run_batch import run_batch

        return run_batch(settings, file, arguments.output_file)
    if settings.bus is None:
        raise SettingsError("--bus is needed: the URL of the bus of the deployment (or PAGEBUS_BUS)")
    check_names(arguments)
    from pagebus.actors.commands.jobs.actions import act

    return act(arguments, settings)
