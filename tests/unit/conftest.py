from __future__ import annotations

from hypothesis import HealthCheck, settings

# A busy machine draws and runs examples slowly; speed belongs in benchmarks.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")
