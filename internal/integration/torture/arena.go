//go:build unix

package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/devmappa/watermill-inbox/internal/integration/testproxy"
	"github.com/devmappa/watermill-inbox/internal/servers"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// arena is the servers, started for the run alone, and the bad networks to them.
type arena struct {
	rabbitmq   *servers.RabbitMQ
	toRabbitMQ *testproxy.Proxy

	postgresql   *servers.PostgreSQL // nil with SQLite
	toPostgreSQL *testproxy.Proxy

	folder string // SQLite's file, and the sign that the output is away

	kind string
	dsn  string  // what workers open
	db   *sql.DB // past the bad network
}

// idleLimit is PostgreSQL's patience with a transaction in which nothing happens.
const idleLimit = 3 * time.Second

func newArena(ctx context.Context, kind string) (_ *arena, err error) {
	a := &arena{kind: kind}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.close())
		}
	}()
	if a.folder, err = os.MkdirTemp("", "inbox-torture-"); err != nil {
		return nil, err
	}
	if a.rabbitmq, err = servers.StartRabbitMQ(ctx); err != nil {
		return nil, err
	}
	if a.toRabbitMQ, err = proxyTo(a.rabbitmq.URI()); err != nil {
		return nil, err
	}
	if err := a.openDatabase(ctx); err != nil {
		return nil, err
	}
	for _, statement := range []string{
		`CREATE TABLE accounts (id integer PRIMARY KEY)`,
		`INSERT INTO accounts SELECT * FROM (WITH RECURSIVE n (id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n WHERE id < 200) SELECT id FROM n) AS numbers`,
		// Without unique keys: nothing but the inbox keeps a copy out.
		`CREATE TABLE ledger (payment text NOT NULL, cents bigint NOT NULL)`,
		`CREATE TABLE audits (payment text NOT NULL)`,
		`CREATE TABLE invoices (payment text NOT NULL, event text NOT NULL)`,
	} {
		if _, err := a.db.ExecContext(ctx, statement); err != nil {
			return nil, fmt.Errorf("%s: %w", statement, err)
		}
	}
	return a, a.declare()
}

func (a *arena) openDatabase(ctx context.Context) (err error) {
	var adapter inboxsql.SchemaAdapter
	if a.kind == "sqlite" {
		a.dsn = "file:" + filepath.Join(a.folder, "torture.db") + "?_pragma=busy_timeout(10000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)"
		a.db, adapter, err = openSQL("sqlite", a.dsn)
	} else {
		if a.postgresql, err = servers.StartPostgreSQL(ctx); err != nil {
			return err
		}
		if a.toPostgreSQL, err = proxyTo(a.postgresql.URL()); err != nil {
			return err
		}
		if a.dsn, err = through(a.postgresql.URL(), a.toPostgreSQL, url.Values{
			"application_name":                    {workerName},
			"idle_in_transaction_session_timeout": {fmt.Sprint(idleLimit.Milliseconds())},
			"connect_timeout":                     {"5"},
		}); err != nil {
			return err
		}
		a.db, adapter, err = openSQL("lib/pq", a.postgresql.URL())
	}
	if err != nil {
		return err
	}
	repository, err := inboxsql.NewRepository(a.db, inboxsql.Options{SchemaAdapter: adapter})
	if err != nil {
		return err
	}
	return repository.InitializeSchema(ctx)
}

const workerName = "torture"

func (a *arena) close() error {
	var errs []error
	if a.db != nil {
		errs = append(errs, a.db.Close())
	}
	for _, proxy := range []*testproxy.Proxy{a.toRabbitMQ, a.toPostgreSQL} {
		if proxy != nil {
			proxy.Close()
		}
	}
	if a.postgresql != nil {
		errs = append(errs, a.postgresql.Stop())
	}
	if a.rabbitmq != nil {
		errs = append(errs, a.rabbitmq.Stop())
	}
	if a.folder != "" {
		errs = append(errs, os.RemoveAll(a.folder))
	}
	return errors.Join(errs...)
}

// worker is what a worker needs to know, by its number.
func (a *arena) worker(number int, inboxName string) workerConfig {
	names := stores[a.kind]
	store := names[number%len(names)]
	if store == "pgx" && inboxName != ours {
		store = names[0]
	}
	uri, _ := through(a.rabbitmq.URI(), a.toRabbitMQ, nil) // it was parsed before
	return workerConfig{Number: number, Store: store, DSN: a.dsn, AMQP: uri, Inbox: inboxName, Away: a.awayFile()}
}

// awayFile is there while the workers' output is away.
func (a *arena) awayFile() string { return filepath.Join(a.folder, "away") }

// deliveryLimit is how often the broker delivers a payment before it drops it. Other faults use up few deliveries: one
// for each connection or worker that is lost, and about one a second while the database is away, since a failed attempt
// is tried again before the message is nacked. Without a back-off, a publish that fails at once uses up all of them
// within a second or two, which is less than awayFor.
const deliveryLimit = 100

// queueArguments are those with which workers declare.
var queueArguments = map[string]amqp091.Table{
	bookings: {"x-queue-type": "quorum", "x-delivery-limit": deliveryLimit},
	invoices: {"x-queue-type": "quorum"},
}

func (a *arena) declare() error {
	return a.onChannel(func(channel *amqp091.Channel) error {
		if err := channel.ExchangeDeclare(events, amqp091.ExchangeFanout, true, false, false, false, nil); err != nil {
			return err
		}
		for _, queue := range []string{bookings, audits, invoices, tap} {
			if _, err := channel.QueueDeclare(queue, true, false, false, false, queueArguments[queue]); err != nil {
				return err
			}
		}
		for _, queue := range []string{invoices, tap} {
			if err := channel.QueueBind(queue, "", events, false, nil); err != nil {
				return err
			}
		}
		return nil
	})
}

// missing are the queues that are not there. RabbitMQ 3.10 can forget a queue when it is killed within a second of
// its declaration.
func (a *arena) missing() (queues []string, err error) {
	for _, queue := range []string{bookings, audits, invoices, tap} {
		err := a.onChannel(func(channel *amqp091.Channel) error {
			_, err := channel.QueueDeclarePassive(queue, true, false, false, false, queueArguments[queue])
			return err
		})
		var refused *amqp091.Error
		switch {
		case errors.As(err, &refused) && refused.Code == amqp091.NotFound:
			queues = append(queues, queue)
		case err != nil:
			return nil, err
		}
	}
	return queues, nil
}

// onChannel does something on a connection of its own, past the bad network.
func (a *arena) onChannel(do func(*amqp091.Channel) error) error {
	conn, err := amqp091.Dial(a.rabbitmq.URI())
	if err != nil {
		return err
	}
	defer conn.Close()
	channel, err := conn.Channel()
	if err != nil {
		return err
	}
	return do(channel)
}

// waiting is how many messages are in the workers' queues, those in their hands not counted.
func (a *arena) waiting() (messages int, err error) {
	err = a.onChannel(func(channel *amqp091.Channel) error {
		for _, queue := range []string{bookings, audits, invoices} {
			state, err := channel.QueueDeclarePassive(queue, true, false, false, false, queueArguments[queue])
			if err != nil {
				return err
			}
			messages += state.Messages
		}
		return nil
	})
	return messages, err
}

func proxyTo(address string) (*testproxy.Proxy, error) {
	parsed, err := url.Parse(address)
	if err != nil {
		return nil, err
	}
	return testproxy.Start(parsed.Host)
}

// through is the address by way of a proxy, with more parameters.
func through(address string, proxy *testproxy.Proxy, parameters url.Values) (string, error) {
	parsed, err := url.Parse(address)
	if err != nil {
		return "", err
	}
	parsed.Host = proxy.Address()
	query := parsed.Query()
	for name, values := range parameters {
		query[name] = values
	}
	parsed.RawQuery = query.Encode()
	return parsed.String(), nil
}
