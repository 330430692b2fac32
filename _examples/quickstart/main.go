// Command quickstart shows what the inbox does, on a SQLite file and without any server: payments that are
// delivered three times, to a handler that sometimes fails half-way, first without the inbox and then with it.
//
// It ends with status 1 unless the inbox has booked every payment once.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

// run tells the story, in a folder that is gone afterwards.
func run(ctx context.Context, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	folder, err := os.MkdirTemp("", "inbox-quickstart-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)

	fmt.Fprintf(out, "%d payments and a malformed message, each published %d times. The handler fails half-way through\n"+
		"two of the payments, once with an error and once with a panic.\n\n", payments, copies)
	without, err := process(ctx, filepath.Join(folder, "without.db"), false)
	if err != nil {
		return err
	}
	with, err := process(ctx, filepath.Join(folder, "with.db"), true)
	if err != nil {
		return err
	}
	printTable(out, without, with)

	fmt.Fprintf(out, "\nWithout the inbox %d payments became %d bookings: %s too much.\n",
		payments, without.rows, cents(without.ledger-expected().ledger))
	if with.effects != expected() {
		return fmt.Errorf("with the inbox the effects are %+v, want %+v", with.effects, expected())
	}
	fmt.Fprintln(out, "With the inbox every payment was booked once: a copy finds that the first was processed and is\n"+
		"skipped, and an attempt that fails leaves nothing behind.")
	return nil
}

// process runs a router until every message is acknowledged, and returns what is in the database then.
func process(ctx context.Context, file string, withInbox bool) (result, error) {
	ledger, err := openLedger(ctx, file)
	if err != nil {
		return result{}, err
	}
	defer ledger.db.Close()

	pubSub := gochannel.NewGoChannel(gochannel.Config{}, nil)
	var deliveries deliveries
	router, err := newRouter(ctx, pubSub, ledger, &deliveries, withInbox)
	if err != nil {
		return result{}, err
	}
	ended := make(chan error, 1)
	go func() { ended <- router.Run(ctx) }()
	select {
	case <-router.Running():
	case err := <-ended:
		return result{}, err
	}

	messages := newMessages()
	deliveries.expect(len(messages))
	if err := pubSub.Publish(topic, messages...); err != nil {
		return result{}, err
	}
	if err := deliveries.wait(ctx); err != nil {
		return result{}, err
	}
	if err := router.Close(); err != nil {
		return result{}, err
	}
	effects, err := ledger.effects(ctx)
	return result{effects: effects, deliveries: deliveries.count.Load(), runs: ledger.runs.Load()}, err
}
