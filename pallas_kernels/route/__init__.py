"""Router scores to experts and weights, and on to rows in expert order."""

from pallas_kernels.route.api import Routed, route, route_and_align
from pallas_kernels.route.config import RouteConfig, RouteDesc, config_error
from pallas_kernels.route.reference import route_ref

__all__ = ["RouteConfig", "RouteDesc", "Routed", "config_error", "route", "route_and_align", "route_ref"]
