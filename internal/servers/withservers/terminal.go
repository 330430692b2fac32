//go:build unix

package main

import (
	"os"
	"syscall"
	"unsafe"
)

// inForeground reports whether we are in the foreground process group of a
// terminal, which then sends its signals to the command as well as to us.
func inForeground() bool {
	terminal, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	defer terminal.Close()
	var group int32
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, terminal.Fd(), syscall.TIOCGPGRP, uintptr(unsafe.Pointer(&group)))
	return errno == 0 && int(group) == syscall.Getpgrp()
}
