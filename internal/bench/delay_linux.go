package main

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// delay waits on a timer of the kernel. An idle Go program wakes up from time.Sleep at whole milliseconds,
// which would double the delay.
type delay struct {
	fd    int // timer's; its method Fd would make it blocking
	timer *os.File
	every unix.ItimerSpec
}

func newDelay(d time.Duration) (*delay, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	return &delay{fd, os.NewFile(uintptr(fd), "timer"), unix.ItimerSpec{Value: unix.NsecToTimespec(int64(d))}}, nil
}

func (d *delay) wait() {
	var expirations [8]byte
	if err := unix.TimerfdSettime(d.fd, 0, &d.every, nil); err == nil {
		_, _ = d.timer.Read(expirations[:])
	}
}

func (d *delay) close() { _ = d.timer.Close() }
