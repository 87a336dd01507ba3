"""`nybble devices`."""

import click

from .output import print_json, print_table

EPILOG = """\b
Examples:
  nybble devices
  nybble devices --device raspberry-pi-5
  nybble devices --json
"""


@click.command("devices", epilog=EPILOG)
@click.option("--device", default="auto", show_default=True, help="A device profile's name or file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(device: str, as_json: bool) -> None:
    """Show what was found on this machine, the settings it gives, and the profiles there are."""
    from ..devices import (
        describe,
        describe_profile,
        list_profiles,
        machine_json,
        probe,
        profile_json,
        resolve_device,
    )

    machine = probe()
    profile = resolve_device(device, machine)
    profiles = list_profiles()
    if as_json:
        print_json(
            {
                "machine": machine_json(machine),
                "profile": profile_json(profile),
                "profiles": [p.name for p in profiles],
            }
        )
        return
    print_table("This machine", describe(machine))
    print_table("Settings for --device " + device, describe_profile(profile))
    print_table("Profiles", [(p.name, p.description) for p in profiles])
