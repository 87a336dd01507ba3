"""`nybble devices`."""

from dataclasses import asdict
from pathlib import Path

import click

from .output import print_json, print_table

EPILOG = """\b
Examples:
  nybble devices
  nybble devices --device raspberry-pi-5
  nybble devices --artifact smollm2-int4
  nybble devices --json
"""


@click.command("devices", epilog=EPILOG)
@click.option("--device", default="auto", show_default=True, help="A device profile's name or file.")
@click.option(
    "--artifact", type=click.Path(path_type=Path), help="Measure how fast the disk under this path is read."
)
@click.option("--measure", is_flag=True, help="Measure this machine's limits again.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(device: str, artifact: Path | None, measure: bool, as_json: bool) -> None:
    """Show what was found on this machine, the settings it gives, and the profiles there are. What memory
    and cores can do at most is measured once, in half a second, and kept."""
    from ..devices import (
        describe,
        describe_disk,
        describe_profile,
        disk_read_rate,
        list_profiles,
        machine_json,
        measured,
        probe,
        profile_json,
        resolve_device,
    )

    machine = measured(probe(), again=measure)
    profile = resolve_device(device, machine)
    profiles = list_profiles()
    disk = None if artifact is None else disk_read_rate(artifact)
    if as_json:
        print_json(
            {
                "machine": machine_json(machine),
                "disk": None if disk is None else asdict(disk),
                "profile": profile_json(profile),
                "profiles": [p.name for p in profiles],
            }
        )
        return
    print_table("This machine", describe(machine) + ([] if disk is None else [describe_disk(disk)]))
    print_table("Settings for --device " + device, describe_profile(profile))
    print_table("Profiles", [(p.name, p.description) for p in profiles])
