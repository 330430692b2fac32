package main

import "syscall"

// endWithUs keeps Ctrl-C at the terminal for us alone, and has the kernel kill the process when we end.
func endWithUs() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
