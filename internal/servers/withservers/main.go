//go:build unix

// Command withservers runs a command with real PostgreSQL and RabbitMQ servers:
//
//	withservers [-only postgres|rabbitmq] command [argument ...]
//
// It gets the servers as package servers describes, sets
// WATERMILL_TEST_POSTGRES_URL and WATERMILL_TEST_AMQP_URI for the command,
// passes signals on to it, stops what it started and ends with the command's
// status.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/devmappa/watermill-inbox/internal/servers"
)

func main() {
	os.Exit(run())
}

// run returns the status to exit with.
func run() int {
	only := flag.String("only", "", "provide only this server: postgres or rabbitmq")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: withservers [-only postgres|rabbitmq] command [argument ...]")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() == 0 {
		flag.Usage()
		return 2
	}
	var kinds []servers.Kind
	if *only != "" {
		kind, err := servers.ParseKind(*only)
		if err != nil {
			return fail(2, err)
		}
		kinds = append(kinds, kind)
	}

	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	if !signal.Ignored(syscall.SIGHUP) { // it is under nohup
		signal.Notify(signals, syscall.SIGHUP)
	}
	endWithParent()

	began := time.Now()
	set, caught, err := ensure(signals, kinds)
	if err != nil {
		if caught != nil {
			return fail(128+int(caught.(syscall.Signal)), err)
		}
		return fail(1, err)
	}
	for _, server := range set.Servers {
		fmt.Fprintf(os.Stderr, "withservers: %s\n", server)
	}
	fmt.Fprintf(os.Stderr, "withservers: ready after %.1f s\n", time.Since(began).Seconds())

	status, err := runCommand(signals, flag.Args(), set.Environ())
	if err != nil {
		status = fail(status, err)
	}
	if err := set.Close(); err != nil {
		return fail(max(status, 1), err)
	}
	return status
}

// ensure gets the servers, and gives up at the first signal, which it returns.
func ensure(signals <-chan os.Signal, kinds []servers.Kind) (*servers.Set, os.Signal, error) {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	var set *servers.Set
	var err error
	done := make(chan struct{})
	go func() {
		set, err = servers.Ensure(ctx, kinds...)
		close(done)
	}()
	var caught os.Signal
	for {
		select {
		case <-done:
			if err == nil && caught != nil { // it came too late to stop the start
				err = errors.Join(context.Cause(ctx), set.Close())
			}
			return set, caught, err
		case caught = <-signals:
			cancel(fmt.Errorf("withservers: signal %q while the servers were starting", caught))
		}
	}
}

// runCommand runs the command, passes signals on and returns its status, as a
// shell would give it.
func runCommand(signals <-chan os.Signal, command, environ []string) (int, error) {
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(os.Environ(), environ...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	// At a terminal the command stays in our process group: it may read, and
	// gets Ctrl-C from the terminal, as we do. Elsewhere it gets a group of its
	// own, so that signals can be passed on to all that it has started.
	terminal := inForeground()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: !terminal}
	endWithUs(cmd.SysProcAttr)
	if err := cmd.Start(); err != nil {
		if errors.Is(err, exec.ErrNotFound) {
			return 127, err
		}
		return 126, err
	}

	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case s := <-signals:
			number := s.(syscall.Signal)
			switch {
			case !terminal:
				_ = syscall.Kill(-cmd.Process.Pid, number)
			case number != syscall.SIGINT && number != syscall.SIGQUIT:
				_ = cmd.Process.Signal(number)
			}
		case err := <-ended:
			if wait := cmd.ProcessState.Sys().(syscall.WaitStatus); wait.Signaled() {
				return 128 + int(wait.Signal()), nil
			}
			if exit := new(exec.ExitError); !errors.As(err, &exit) && err != nil {
				return 1, err
			}
			return cmd.ProcessState.ExitCode(), nil
		}
	}
}

// fail says what is wrong and returns the status.
func fail(status int, err error) int {
	fmt.Fprintln(os.Stderr, "withservers:", err)
	return status
}
