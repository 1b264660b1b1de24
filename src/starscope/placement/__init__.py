"""Which operation, tensor and cache goes on which device, and the bytes that each device then holds.

    ladder      the rungs of `-ngl N` over a graph's operations
    schedule    in which order what runs where, and what moves; the bytes of values on the way
    plan        bytes, what fits, the report
    devices     "cuda:24GiB" as a device

All of it is pure: no device is looked at and nothing is allocated.
"""

from starscope.placement.devices import parse_devices as parse_devices
from starscope.placement.ladder import HOST as HOST
from starscope.placement.ladder import Rungs as Rungs
from starscope.placement.plan import BATCH as BATCH
from starscope.placement.plan import LOW_VRAM_BATCH as LOW_VRAM_BATCH
from starscope.placement.plan import Bytes as Bytes
from starscope.placement.plan import Device as Device
from starscope.placement.plan import Layers as Layers
from starscope.placement.plan import Plan as Plan
from starscope.placement.plan import check_options as check_options
from starscope.placement.plan import make_plan as make_plan
from starscope.placement.schedule import Segment as Segment
from starscope.placement.schedule import make_schedule as make_schedule
