"""`duoka sync run.yaml --hosts a,b`: code, config, small data and the list of packages to the other machines."""

from __future__ import annotations

from pathlib import Path

import click

from duoka.cli.hosts import HostFlags, host_options, typed_hosts


@click.command(
    "sync", help="Bring the working folder, CONFIG's data and the list of packages to the machines of --hosts."
)
@click.argument("config", type=click.Path(), required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@host_options
@click.option("--limit", default="1GiB", show_default=True, help="More than this is refused, with the largest files.")
@click.option("--dry-run", is_flag=True, help="Only say what would be brought.")
def command(
    config: str | None, overrides: tuple[str, ...], hosts: str, hostfile: str, include: str, exclude: str, limit: str,
    dry_run: bool,
) -> int:  # fmt: skip
    import shlex
    import sys

    from duoka.cli.doctor import paths_of
    from duoka.cluster.sync import LOCK, bring, pack, write_lock
    from duoka.config.hosts import read_hosts
    from duoka.config.load import load_config
    from duoka.errors import ConfigError
    from duoka.units import format_bytes, parse_bytes

    loaded = load_config(config, overrides) if config else None
    found = typed_hosts(HostFlags(hosts, hostfile, include, exclude))
    if not found and loaded is not None:
        found = read_hosts(loaded.config.cluster.hosts)
    if not found:
        raise ConfigError("no machine is named", fix="write for example:   duoka sync run.yaml --hosts node1,node2")
    try:
        limit_bytes = parse_bytes(limit)
    except ValueError as error:
        raise ConfigError(f"--limit: {error}", fix="write for example:   --limit 5GiB") from None
    here = Path.cwd()
    lock = write_lock(here)
    output = Path(loaded.config.output if loaded is not None else "runs").expanduser()
    cargo = pack(here, [*(paths_of(loaded) if loaded is not None else ()), str(lock)], here / output, limit_bytes)
    for line in cargo.left_out:
        click.echo(f"note: {line}", err=True)
    click.echo(f"{here}: {len(cargo.files):,} files, {format_bytes(cargo.num_bytes)}")
    if dry_run:
        for name, (size, _) in cargo.files.items():
            click.echo(f"  {name}  {format_bytes(size)}")
        return 0
    for one in bring(found, cargo):
        click.echo(
            f"{one.host}: {one.num_files:,} files sent, {format_bytes(one.num_bytes)}; {one.num_alike:,} were there"
        )
    install = shlex.join([sys.executable, "-m", "pip", "install", "-r", str(here / LOCK)])
    click.echo(f"packages: on a machine where duoka doctor finds other versions:   ssh NODE {install}")
    return 0
