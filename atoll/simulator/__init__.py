"""The WAN on one machine: real processes, real gRPC, links limited in rate and delay."""
