package main

import (
	"os"
	"runtime"
	"syscall"
)

// endWithParent has the kernel send us a SIGTERM when our parent ends. "go run"
// does not pass a SIGTERM on: without this, the servers would outlive it.
func endWithParent() {
	parent := os.Getppid()
	syscall.RawSyscall(syscall.SYS_PRCTL, syscall.PR_SET_PDEATHSIG, uintptr(syscall.SIGTERM), 0)
	if os.Getppid() != parent { // it ended just before
		_ = syscall.Kill(os.Getpid(), syscall.SIGTERM)
	}
}

// endWithUs has the kernel send the command a SIGTERM when we are killed.
func endWithUs(attributes *syscall.SysProcAttr) {
	// The kernel takes the end of the starting thread for our end: stay on this
	// one, the main thread.
	runtime.LockOSThread()
	attributes.Pdeathsig = syscall.SIGTERM
}
