"""One simulated island: the real node, behind a slow line. `python -m atoll.simulator.island SETTINGS.json`"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from atoll.process import run_to_end
from atoll.simulator.scenario import Link
from atoll.simulator.shaped_transport import ShapedTransport
from node.island_settings import IslandSettings
from node.join import join
from node.site import Site
from protocol.grpc_transport import GrpcTransport


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_bytes())
    link = Link.model_validate(settings.pop("link"))
    island = IslandSettings.model_validate(settings.pop("island"))
    state, cache = Path(settings.pop("state")), Path(settings.pop("cache"))
    site = Site(**settings, state=state, cache=cache, island=island)

    async def live() -> None:
        await join(site, ShapedTransport(GrpcTransport(), link))

    run_to_end(live())


if __name__ == "__main__":
    main()
