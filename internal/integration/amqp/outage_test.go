//go:build unix

package amqp_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	amqp091 "github.com/rabbitmq/amqp091-go"

	inbox "github.com/devmappa/watermill-inbox"
	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
	"github.com/devmappa/watermill-inbox/internal/servers"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// The database is away for a while, with a message in a handler's hands and others in the queue. With a back-off
// outside of the inbox the broker does not notice.
func TestDatabaseIsAway(t *testing.T) {
	t.Parallel()
	server, err := servers.StartPostgreSQL(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // registered first: after all that needs the server
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	b := newBroker(t)
	dead := b.name("dead")
	b.declare(dead, nil)
	s := newServiceAt(t, server.URL(), quorumWithLimit(20, dead))
	s.publish(s.queue, amqp091.Publishing{MessageId: "0"})

	const interval = 100 * time.Millisecond
	refused := make(chan struct{}, 1<<16)
	inHand, away := make(chan struct{}), make(chan struct{})
	var once sync.Once
	backOff := retry(1000, interval)
	backOff.ShouldRetry = func(params middleware.RetryParams) bool {
		refused <- struct{}{}
		return inbox.ShouldRetry(params)
	}
	i := s.start(setup{retry: backOff, handler: func(msg *message.Message) error {
		err := s.write(msg)
		once.Do(func() {
			close(inHand)
			waitInHandler(msg, away)
		})
		return err
	}})
	await(t, inHand, "the first message")
	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	for id := 1; id <= 3; id++ {
		s.publish(s.queue, amqp091.Publishing{MessageId: fmt.Sprint(id), DeliveryMode: amqp091.Persistent})
	}
	close(away)
	const enough = 20 // two seconds
	for n := range enough {
		await(t, refused, fmt.Sprintf("failed attempt %d", n+1))
	}
	if answered := len(i.deliveries); answered > 0 {
		t.Errorf("%d deliveries are answered during the outage", answered)
	}
	if err := server.Restart(context.Background()); err != nil {
		t.Fatal(err)
	}
	back := time.Now()
	for _, d := range i.wait(4) {
		if d.metadata[inboxamqp.RedeliveredKey] != "" || d.metadata[inboxamqp.DeliveryCountKey] != "" {
			t.Errorf("%s was redelivered: %q", d.id, d.metadata)
		}
	}
	t.Logf("away for %s, %d failed attempts, none redelivered; all applied %s after the return",
		back.Sub(begin).Round(time.Millisecond), enough+len(refused), time.Since(back).Round(time.Millisecond))
	if failed, most := enough+len(refused), int(time.Since(begin)/interval)+2; failed > most {
		t.Errorf("%d failed attempts, at most %d fit into the back-off", failed, most)
	}
	i.finish()
	b.mustBeEmpty(dead)
	s.wantPoisoned()
	s.wantEffects("0", "1", "2", "3")
	i.wantLines("processed", 4)
	i.wantLines("duplicate", 0)
	s.wantNoOpenTransaction(s.application)
}

// down is a repository on a database that is never there.
func down(t testing.TB) inbox.Repository {
	t.Helper()
	db, err := sql.Open("postgres", "postgres://postgres@127.0.0.1:1/postgres?sslmode=disable")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	repository, err := inboxsql.NewRepository(db, inboxsql.Options{SchemaAdapter: inboxsql.DefaultPostgreSQLSchema{}})
	if err != nil {
		t.Fatal(err)
	}
	return repository
}

// Pinned, as documented: without a back-off an outage uses up a quorum queue's delivery limit at once. What is then
// lost without a dead-letter exchange is kept with one. The inbox acks nothing.
func TestWithoutBackOff(t *testing.T) {
	t.Parallel()
	const limit = 3
	for _, deadLettered := range []bool{false, true} {
		t.Run(fmt.Sprintf("dead-letter exchange %t", deadLettered), func(t *testing.T) {
			t.Parallel()
			b := newBroker(t)
			dead := b.name("dead")
			b.declare(dead, nil)
			arguments := quorumWithLimit(limit, "")
			if deadLettered {
				arguments = quorumWithLimit(limit, dead)
			}
			s := newService(t, arguments)
			s.publish(s.queue, amqp091.Publishing{MessageId: "m"})
			i := s.start(setup{inboxOnly: true, repository: down(t), handler: s.write})
			begin := time.Now()
			countsNacks := true
			for n := range 1 + limit {
				d := await(t, i.deliveries, fmt.Sprintf("delivery %d", n+1))
				var failed *inbox.Error
				if !errors.As(d.err, &failed) || failed.Step != "claim" {
					t.Errorf("answered with %v, want an error of the claim", d.err)
				}
				if d.metadata[inboxamqp.AcquiredCountKey] != "" {
					countsNacks = false // RabbitMQ 4.3 and later
				}
			}
			t.Logf("%d deliveries in %s", 1+limit, time.Since(begin).Round(time.Millisecond))
			i.settled.wait(t)
			switch {
			case !countsNacks:
				i.stop()
				if got := b.ready(s.queue); got != 1 {
					t.Errorf("%d messages in the queue, want the one", got)
				}
			case deadLettered:
				if got := b.take(dead); got.MessageId != "m" {
					t.Errorf("dead-lettered is %q", got.MessageId)
				}
				fallthrough
			default:
				i.finish()
			}
			s.wantEffects()
			s.wantPoisoned()
		})
	}
}

// Neither an outage nor a shutdown is the message's fault.
func TestOutageAndShutdownPoisonNothing(t *testing.T) {
	t.Parallel()

	// stopInBackOff starts an instance that is stopped while Retry waits.
	stopInBackOff := func(s *service, options setup) {
		s.Helper()
		backingOff := make(chan struct{})
		var once sync.Once
		options.retry = retry(10, time.Hour)
		options.retry.ShouldRetry = func(params middleware.RetryParams) bool {
			once.Do(func() { close(backingOff) })
			return inbox.ShouldRetry(params)
		}
		i := s.start(options)
		await(s, backingOff, "the back-off")
		begin := time.Now()
		i.stop()
		took := time.Since(begin)
		s.Logf("router.Close in the back-off took %s", took.Round(time.Millisecond))
		if took > maxShutdown {
			s.Errorf("router.Close took %s", took)
		}
		if d := await(s, i.deliveries, "the answer"); !errors.Is(d.err, context.Canceled) {
			s.Errorf("answered with %v", d.err)
		}
	}
	// stillThere checks that the message is where it was, and applied when all is well.
	stillThere := func(s *service) {
		s.Helper()
		s.wantPoisoned()
		s.wantEffects()
		if got := s.ready(s.queue); got != 1 {
			s.Fatalf("%d messages in the queue, want the one", got)
		}
	}
	mend := func(s *service) {
		s.Helper()
		i := s.start(setup{handler: s.write})
		i.wait(1)
		i.finish()
		s.wantEffects("m")
		s.wantPoisoned()
	}

	t.Run("database down", func(t *testing.T) {
		t.Parallel()
		s := newService(t, nil)
		s.publish(s.queue, amqp091.Publishing{MessageId: "m"})
		repository := down(t)
		neverRuns := func(*message.Message) error {
			t.Error("the handler ran without a claim")
			return nil
		}
		exhausted := s.start(setup{repository: repository, handler: neverRuns})
		for range 2 {
			var failed *inbox.Error
			if d := await(t, exhausted.deliveries, "a delivery past all retries"); !errors.As(d.err, &failed) || failed.Step != "claim" {
				t.Errorf("answered with %v, want an error of the claim", d.err)
			}
		}
		exhausted.stop()
		if got := len(exhausted.attempts); got < 2*4 {
			t.Errorf("%d attempts, want at least 4 for each delivery", got)
		}
		stillThere(s)
		stopInBackOff(s, setup{repository: repository, handler: neverRuns})
		stillThere(s)
		mend(s)
	})

	t.Run("the handler has failed once", func(t *testing.T) {
		t.Parallel()
		s := newService(t, nil)
		s.publish(s.queue, amqp091.Publishing{MessageId: "m"})
		stopInBackOff(s, setup{handler: func(msg *message.Message) error {
			if err := s.write(msg); err != nil {
				return err
			}
			return errHandler
		}})
		stillThere(s)
		mend(s)
	})
}
