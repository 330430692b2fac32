// Command cqrs runs Watermill's CQRS component with the inbox, on PostgreSQL alone: event handlers, a group of
// handlers, and an event bus inside of a handler. Every event is published three times, and handlers fail.
//
// It starts a private PostgreSQL server unless WATERMILL_TEST_POSTGRES_URL names one, and ends with status 1 unless
// everything has happened once.
package main

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/signal"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/lib/pq"
)

const copies = 3

func main() {
	orders := flag.Int("orders", 10, "orders to place")
	flag.Parse()
	if *orders < failingOrder || flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "cqrs: -orders is at least %d\n", failingOrder)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *orders, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "cqrs:", err)
		os.Exit(1)
	}
}

// run tells the story, in a database schema that is gone afterwards.
func run(ctx context.Context, orders int, out io.Writer) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, 2*time.Minute, errors.New("not done within two minutes"))
	defer cancel()
	address, stop, err := startPostgreSQL(ctx, out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	db, remove, err := openSchema(ctx, address)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()

	fmt.Fprintf(out, "\n%d orders are placed, each event is published %d times. write_invoice fails once after it has published its\n"+
		"own event, and the second function of the group loyalty fails once after the first has added points.\n\n", orders, copies)
	placed, err := process(ctx, db, orders)
	if err != nil {
		return err
	}
	return report(ctx, out, db, placed)
}

// process runs the application until every event is handled.
func process(ctx context.Context, db *sql.DB, orders int) (*placed, error) {
	if err := createTables(ctx, db); err != nil {
		return nil, err
	}
	counts := newCounts()
	router, err := newRouter(ctx, db, counts)
	if err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- router.Run(ctx) }()
	select {
	case <-router.Running():
	case err := <-ended:
		return nil, err
	}

	// Outside of a handler there is no transaction: events are published through the pool. A publisher that
	// does not know whether it was heard repeats itself, under the same UUID.
	publisher, err := watermillsql.NewPublisher(db, watermillsql.PublisherConfig{SchemaAdapter: schemaAdapter}, watermill.NopLogger{})
	if err != nil {
		return nil, err
	}
	p := &placed{counts: counts, orders: orders}
	for i := 1; i <= orders; i++ {
		event := OrderPlaced{Order: i, Customer: fmt.Sprintf("customer-%d", i%3), Cents: int64(1000 + 250*i)}
		p.cents += event.Cents
		msg, err := marshaler.Marshal(event)
		if err != nil {
			return nil, err
		}
		for range copies {
			if err := publisher.Publish(marshaler.Name(event), msg); err != nil {
				return nil, err
			}
		}
	}

	for _, handler := range []string{"reserve_stock", "write_invoice", "loyalty"} {
		if err := counts.wait(ctx, handler, orders*copies); err != nil {
			return nil, err
		}
	}
	if p.events, err = count(ctx, db, `SELECT count(*) FROM "watermill_InvoiceWritten"`); err != nil {
		return nil, err
	}
	if err := counts.wait(ctx, "book_revenue", int(p.events)); err != nil {
		return nil, err
	}
	return p, router.Close()
}

// openSchema gives the run a schema of its own on the server.
func openSchema(ctx context.Context, address string) (*sql.DB, func() error, error) {
	random := make([]byte, 4)
	_, _ = rand.Read(random) // never fails
	schema := "cqrs_example_" + hex.EncodeToString(random)
	u, err := url.Parse(address)
	if err != nil {
		return nil, nil, errors.New("WATERMILL_TEST_POSTGRES_URL is not a URL") // the error would show the password
	}
	query := u.Query()
	query.Set("search_path", schema)
	u.RawQuery = query.Encode()
	db, err := sql.Open("postgres", u.String())
	if err != nil {
		return nil, nil, err
	}
	// Each of the four subscribers has a transaction open while its handler runs in another, the inbox's.
	// With fewer connections they would wait for each other.
	db.SetMaxOpenConns(10)
	db.SetMaxIdleConns(10)
	if _, err := db.ExecContext(ctx, `CREATE SCHEMA `+pq.QuoteIdentifier(schema)); err != nil {
		return nil, nil, errors.Join(err, db.Close())
	}
	return db, func() error {
		_, err := db.Exec(`DROP SCHEMA ` + pq.QuoteIdentifier(schema) + ` CASCADE`)
		return errors.Join(err, db.Close())
	}, nil
}
