//go:build unix

// Command demo shows what the inbox is for, on real servers and real processes. It sends every payment
// several times to consumers (amqp_example), kills one of them, stops another, starts both again, and
// compares the ledger with what was sent.
//
//	go run ./internal/servers/withservers go run ./internal/demo [-naive]
//
// It ends with status 0 if every payment was booked once, and with 1 on any difference; with -naive the
// difference is what there is to see.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"
)

type options struct {
	payments   int
	copies     int
	concurrent int
	naive      bool
	verbose    bool
	timeout    time.Duration
}

const (
	consumers   = 3
	malformed   = 3 // messages that belong in the poison queue
	minPayments = 4 // a quarter of them is a moment

	// stopLimit is how long a consumer may take to end after SIGTERM.
	stopLimit = 10 * time.Second
)

func main() {
	// The kernel ends the consumers with the thread that started them: this one, the main thread.
	runtime.LockOSThread()

	var o options
	flag.IntVar(&o.payments, "payments", 1000, "payments to send")
	flag.IntVar(&o.copies, "copies", 3, "how often each payment is sent")
	flag.IntVar(&o.concurrent, "concurrent", 4, "messages in flight in each consumer")
	flag.BoolVar(&o.naive, "naive", false, "work without the inbox, to see double charges")
	flag.BoolVar(&o.verbose, "v", false, "print the consumers' logs to stderr")
	flag.DurationVar(&o.timeout, "timeout", 2*time.Minute, "give up after this time")
	flag.Parse()
	if o.payments < minPayments || o.copies < 1 || o.concurrent < 1 || flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "demo: -payments is at least %d, -copies and -concurrent at least 1\n", minPayments)
		flag.Usage()
		os.Exit(2)
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ok, err := run(ctx, o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
	}
	if !ok || err != nil {
		os.Exit(1)
	}
}

// run makes a stage, plays on it, and reports, also when the play was cut short.
func run(ctx context.Context, o options) (ok bool, err error) {
	fmt.Println("building amqp_example")
	binary, removeBinary, err := build(ctx)
	if err != nil {
		return false, err
	}
	defer removeBinary()

	ctx, cancel := context.WithTimeoutCause(ctx, o.timeout, fmt.Errorf("not done within %s", o.timeout))
	defer cancel()
	s, err := newStage(ctx)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, s.remove()) }()

	result := result{options: o, load: newLoad(o)}
	crew := newCrew(binary, s, o)
	played := play(ctx, s, crew, o, result.load)
	crew.kill()
	result.counts = crew.tally.counts()
	if err := result.collect(s); err != nil {
		return false, errors.Join(played, err)
	}
	result.unfinished = played != nil
	result.print(os.Stdout)
	if played != nil {
		crew.tally.printErrors(os.Stderr)
	}
	_, ok = result.verdict()
	return ok, played
}

// play is what happens, in its order.
func play(ctx context.Context, s *stage, crew *crew, o options, load load) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	crew.fail = fail
	began := time.Now()
	say := func(format string, args ...any) {
		fmt.Printf("%6.2f s  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
	}

	for number := 1; number <= consumers; number++ {
		if err := crew.start(ctx, number); err != nil {
			return err
		}
	}
	say("%d consumers started, each with %d messages in flight", consumers, o.concurrent)

	published := make(chan error, 1)
	go func() { published <- s.publish(ctx, load.messages) }()
	say("publishing %d payments, %d times each, shuffled, and %d malformed messages", o.payments, o.copies, malformed)

	// The one that has just begun to book a payment is killed, to hit it before the commit.
	quarter, err := crew.tally.wait(ctx, o.payments/4)
	if err != nil {
		return err
	}
	killed := quarter.booking
	crew.member(killed).kill()
	say("consumer %d killed (SIGKILL) while it booked payments, after a quarter of them", killed)

	if _, err := crew.tally.wait(ctx, o.payments/2); err != nil {
		return err
	}
	stopped := killed%consumers + 1
	took, err := crew.member(stopped).stop()
	if err != nil {
		return err
	}
	say("consumer %d stopped (SIGTERM) after half of the payments, ended in %.2f s with status 0", stopped, took.Seconds())

	for _, number := range []int{killed, stopped} {
		if err := crew.start(ctx, number); err != nil {
			return err
		}
	}
	say("both started again")

	if err := <-published; err != nil {
		return fmt.Errorf("publishing: %w", err)
	}
	if err := drain(ctx, s, crew); err != nil {
		return err
	}
	say("queue empty, all consumers stopped")
	return nil
}

// drain lets the consumers empty the queue and stops them. Messages in flight are not in the queue and
// come back when their consumer stops, so it looks again after that.
func drain(ctx context.Context, s *stage, crew *crew) error {
	for {
		if err := s.waitUntilIdle(ctx, crew.tally); err != nil {
			return err
		}
		if err := crew.stop(); err != nil {
			return err
		}
		if left, err := s.left(ctx); left == 0 || err != nil {
			return err
		}
		if err := crew.start(ctx, 1); err != nil {
			return err
		}
	}
}
