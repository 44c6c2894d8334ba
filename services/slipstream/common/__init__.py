"""What every service shares: errors, config, telemetry, auth, channels, serving. No torch, no service names."""
