"""The fault campaign: kills, full disks, damaged files, hostile flags and malformed requests (`make fuzz`)."""
