"""Weights & Biases and TensorBoard, which get the rows of metrics.jsonl too."""

import netrc
import os
import tempfile
import time
from dataclasses import asdict
from numbers import Real
from urllib.parse import urlsplit

from etils import epath

from config import SECTIONS, Config
from errors import USAGE, UserError, describe
from files import is_remote, local_folder, upload_folder
from panels import PANELS
from rundir import read_record
from utils import only_warn, say, warn


def row_fields(row: dict) -> dict:
    """The fields of a row under their names on a board: kind/field, and val/.. for named sets."""
    fields = {name: row[name] for name in row if name not in ("kind", "step", "data")}
    sources = fields.pop("tokens_by_source", {})
    fields |= {f"tokens_by_source/{source}": tokens for source, tokens in sources.items()}
    if row["kind"] in PANELS:
        fields = PANELS[row["kind"]].board_fields(row)
    if "set" in row:  # its loss is val/name
        prefix = f"val/{fields.pop('set')}"
        return {prefix: fields.pop("loss")} | {f"{prefix}/{x}": y for x, y in fields.items()}
    return {f"{row['kind']}/{name}": value for name, value in fields.items()}


def open_boards(run: epath.Path, cfg: Config, step: int) -> list:
    """The boards that the run uses.  Each has send, upload and close, whose failures are only
    warnings, because metrics.jsonl has all rows.  step: the update the run resumes from.

    Raises as start_wandb."""
    boards = []
    if session := start_wandb(run, cfg):
        boards.append(Wandb(session))
        if step <= cfg.rollback:  # else this is a restart, which has not gone back again
            boards[0].send(dict(kind="rollback", step=step, to=step))
    if cfg.log.tensorboard:
        with only_warn("tensorboard is off"):
            boards.append(TensorBoard(run, step))
    return boards


class TensorBoard:
    """The numbers of the rows as scalars for TensorBoard, in tensorboard/ of the run directory.

    A run that resumes writes another file, which begins by purging what is after `step`.
    """

    def __init__(self, run: epath.Path, step: int):
        from tensorboardX import event_file_writer, summary  # here because they take 0.2 s
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self.folder = run / "tensorboard"
        self.local = local_folder(self.folder)
        self.local.mkdir(parents=True, exist_ok=True)
        # Not SummaryWriter: once its thread has failed, as on a full disk, it waits for ever.  The
        # suffix is there because the names have no time below a second.
        self.writer = event_file_writer.EventsWriter(os.fspath(self.local / "events"), f".{step}")
        self.event, self.scalar, self.flush_at = Event, summary.scalar, 0.0
        self.write(step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, **content):
        self.writer.write_event(self.event(wall_time=time.time(), step=step, **content))

    def send(self, row: dict):
        if self.writer is None:
            return
        try:
            for name, x in row_fields(row).items():
                if isinstance(x, Real):
                    self.write(row["step"], summary=self.scalar(name, x))
            if time.monotonic() >= self.flush_at:  # so that a viewer is a minute late at most
                self.writer.flush()
                self.flush_at = time.monotonic() + 60
        except Exception as e:  # the file may end within an event, and no other can follow that
            self.writer = None
            warn(f"tensorboard is off ({describe(e)}); metrics.jsonl has everything")

    def upload(self):
        """Bring the file up to date."""
        with only_warn("tensorboard was not written"):
            if self.writer is not None:
                self.writer.flush()
            upload_folder(self.local, self.folder)

    def close(self):
        self.upload()


# ---- Weights & Biases


class Wandb:
    """The rows at Weights & Biases, their fields named kind/field, and lists as histograms."""

    def __init__(self, session):
        """session: see start_wandb."""
        self.session = session

    def send(self, row: dict):
        if self.session is None:
            return
        with only_warn("wandb lost a row"):
            import wandb

            fields = row_fields(row)
            lists = {name: x for name, x in fields.items() if isinstance(x, list)}
            histograms = {name: wandb.Histogram(x) for name, x in lists.items()}
            try:
                self.session.log(fields | histograms | dict(step=row["step"]))
            except ConnectionError as e:  # wandb's own process has ended
                self.session = None
                warn(f"wandb is off ({describe(e)}); metrics.jsonl has everything")

    def upload(self):
        """A process of wandb's own sends the rows."""

    def close(self):
        with only_warn("wandb did not finish"):
            if self.session is not None:
                self.session.finish()


def start_wandb(run: epath.Path, cfg: Config):
    """The run's session at Weights & Biases, or None where it is off or does not start.

    Raises UserError USAGE where it does not start though log.wandb=required.
    """
    mode, required = cfg.log.wandb, cfg.log.wandb == "required"
    if mode == "online":
        mode = os.environ.get("WANDB_MODE") or mode  # for machines without a network
    if mode in ("off", "disabled"):
        return None
    if mode != "offline" and not has_wandb_key():
        if required:
            fix = "set WANDB_API_KEY or run `wandb login`, or use --log.wandb online"
            raise UserError(USAGE, "log.wandb=required but no API key was found", fix)
        say("wandb: no API key, so this run is logged offline; `wandb sync` uploads it later")
        mode = "offline"
    try:
        return init_wandb(run, cfg, "online" if required else mode)
    except Exception as e:  # wandb raises many types; unless it is required, training goes on
        why = describe(e)
        if required:
            what = f"log.wandb=required but it did not start: {why}"
            fix = "fix the connection, or use --log.wandb online"
            raise UserError(USAGE, what, fix) from None
        warn(f"wandb is off ({why}); metrics.jsonl has everything")
        return None


def has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    server = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    try:
        keys = netrc.netrc(os.environ.get("NETRC") or None)
    except (OSError, netrc.NetrcParseError):
        return False
    return bool(keys.authenticators(urlsplit(server).netloc))


def init_wandb(run: epath.Path, cfg: Config, mode: str):
    import wandb

    stays = mode == "offline" and is_remote(run)  # for `wandb sync`
    folder = tempfile.mkdtemp(prefix="trifold-") if stays else local_folder(run)
    settings = dict(console="off", save_code=False, disable_git=True, init_timeout=30)
    # Without a limit a run would not end until a network that is gone comes back.  Most
    # schedulers kill a process 30 s after SIGTERM, and its exit code would be lost.
    settings |= dict(finish_timeout=20, finish_timeout_raises=True)
    names = dict(project=cfg.log.wandb_project, name=cfg.run.name, id=read_record(run)["run_id"])
    config = {section: asdict(getattr(cfg, section)) for section in SECTIONS}
    options = dict(dir=os.fspath(folder), mode=mode, resume="allow")
    session = wandb.init(**names, **options, config=config, settings=wandb.Settings(**settings))
    session.define_metric("*", step_metric="step")
    return session
