//go:build !linux

package main

import "time"

// delay may be longer than asked for: the resolution is the system's.
type delay struct{ time.Duration }

func newDelay(d time.Duration) (*delay, error) { return &delay{d}, nil }

func (d *delay) wait() { time.Sleep(d.Duration) }

func (d *delay) close() {}
