package amqp_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	amqp091 "github.com/rabbitmq/amqp091-go"

	inbox "github.com/devmappa/watermill-inbox"
	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// handlerName is the consumer's name in the inbox, unless a test is about another.
const handlerName = "book"

// service is what the instances of one service share: a queue, a poison queue and a database.
type service struct {
	*broker
	db            *testdb.Database
	application   string // the name of its sessions in PostgreSQL
	queue, poison string
	arguments     amqp091.Table
}

func newService(t testing.TB, arguments amqp091.Table) *service {
	t.Helper()
	return newServiceAt(t, testdb.PostgreSQLURL(t), arguments)
}

func newServiceAt(t testing.TB, postgreSQL string, arguments amqp091.Table) *service {
	t.Helper()
	s := &service{broker: newBroker(t), application: "inbox_" + testdb.RandomName(), arguments: arguments}
	s.db = testdb.PostgreSQLAt(t, "postgres", withApplication(t, postgreSQL, s.application))
	s.db.SetMaxOpenConns(5)
	s.db.Repository(t, inboxsql.Options{}) // for its schema
	s.queue, s.poison = s.name("queue"), s.name("poison")
	s.declare(s.queue, arguments)
	s.declare(s.poison, nil)
	return s
}

func withApplication(t testing.TB, address, name string) string {
	t.Helper()
	parsed, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	query := parsed.Query()
	query.Set("application_name", name)
	parsed.RawQuery = query.Encode()
	return parsed.String()
}

// documentedOrder is the order of middleware that the documentation gives; innermost are the inbox and what a
// test puts around it.
func documentedOrder(
	publisher message.Publisher, poisonQueue string, retry middleware.Retry, innermost ...message.HandlerMiddleware,
) ([]message.HandlerMiddleware, error) {
	poison, err := middleware.PoisonQueueWithFilter(publisher, poisonQueue, inbox.ShouldPoison)
	if err != nil {
		return nil, err
	}
	return append([]message.HandlerMiddleware{
		poison, retry.Middleware, inbox.RestoreContext, middleware.Timeout(patience), middleware.Recoverer,
	}, innermost...), nil
}

func retry(times int, interval time.Duration) middleware.Retry {
	return middleware.Retry{
		MaxRetries: times, InitialInterval: interval, Multiplier: 1,
		ShouldRetry: inbox.ShouldRetry, ResetContextOnRetry: true,
	}
}

// lastAttempt is a Retry without retries. While there are some left, Retry gives the context's error for any error
// at a shutdown; this one passes on what the inbox returns.
var lastAttempt = retry(0, time.Millisecond)

// setup says in what an instance differs from the documented one.
type setup struct {
	handler     message.NoPublishHandlerFunc // required
	name        string                       // of the handler
	retry       middleware.Retry             // default: three times, at once
	inboxOnly   bool                         // no other middleware
	concurrency int                          // messages in flight
	repository  inbox.Repository
	configure   func(*amqp.Config)
	hold        func(error) // called with the result of each delivery, before the router sees it
}

// instance is one running consumer and what is seen of it.
type instance struct {
	*service
	setup
	subscriber message.Subscriber
	middleware []message.HandlerMiddleware
	stop       func()

	deliveries chan delivery // in the order of their answers
	settled    settling
	log        *lineLog

	lock     sync.Mutex
	attempts []error // what each run of the inbox returned
}

// delivery is one message from the broker and what the router was told: nil means ack.
type delivery struct {
	id, body string
	metadata message.Metadata
	err      error
}

// start starts an instance; it ends with the test, or before by its stop.
func (s *service) start(options setup) *instance {
	s.Helper()
	i := s.prepare(options)
	i.stop = startRouter(s, watermill.NopLogger{}, i.add)
	return i
}

// prepare makes an instance without a router.
func (s *service) prepare(options setup) *instance {
	s.Helper()
	i := &instance{service: s, setup: options, deliveries: make(chan delivery, 1<<16), log: &lineLog{lines: map[string]int{}}}
	if i.name == "" {
		i.name = handlerName
	}
	if i.retry.ShouldRetry == nil {
		i.retry = retry(3, time.Millisecond)
	}
	if i.repository == nil {
		repository, err := inboxsql.NewRepository(s.db.DB, inboxsql.Options{SchemaAdapter: s.db.Adapter})
		if err != nil {
			s.Fatal(err)
		}
		i.repository = repository
	}
	once, err := inbox.NewMiddleware(i.repository, inbox.Options{Logger: i.log})
	if err != nil {
		s.Fatal(err)
	}
	config := s.config(s.arguments)
	if i.configure != nil {
		i.configure(&config)
	}
	i.subscriber = s.subscriber(config, watermill.NopLogger{})
	if i.concurrency > 0 {
		if i.subscriber, err = inboxamqp.Concurrent(i.subscriber, i.concurrency); err != nil {
			s.Fatal(err)
		}
	}
	i.middleware = []message.HandlerMiddleware{i.observeAttempts, once.Middleware}
	if !i.inboxOnly {
		i.middleware, err = documentedOrder(s.publisher(s.config(nil)), s.poison, i.retry, i.middleware...)
		if err != nil {
			s.Fatal(err)
		}
	}
	return i
}

func (i *instance) add(router *message.Router) {
	router.AddMiddleware(i.observeDeliveries)
	router.AddMiddleware(i.middleware...)
	router.AddConsumerHandler(i.name, i.queue, i.subscriber, i.handler)
}

func (i *instance) observeDeliveries(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		i.settled.add(msg)
		d := delivery{id: msg.UUID, body: string(msg.Payload), metadata: maps.Clone(msg.Metadata)}
		var produced []*message.Message
		produced, d.err = h(msg)
		if i.hold != nil {
			i.hold(d.err)
		}
		i.deliveries <- d
		return produced, d.err
	}
}

func (i *instance) observeAttempts(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		produced, err := h(msg)
		i.lock.Lock()
		defer i.lock.Unlock()
		i.attempts = append(i.attempts, err)
		return produced, err
	}
}

// wait waits until so many deliveries are answered, and fails the test unless all of them were acked.
func (i *instance) wait(count int) []delivery {
	i.Helper()
	var deliveries []delivery
	for len(deliveries) < count {
		d := await(i, i.deliveries, fmt.Sprintf("delivery %d of %d", len(deliveries)+1, count))
		if d.err != nil {
			i.Errorf("message %.40q (%s) was nacked: %v", d.id, d.body, d.err)
		}
		deliveries = append(deliveries, d)
	}
	return deliveries
}

// finish stops the instance when what it has handled is acked. Nothing may have been delivered beyond what was
// waited for, and nothing may be left in the queue.
func (i *instance) finish() {
	i.Helper()
	i.settled.wait(i)
	i.stop()
	if surplus := len(i.deliveries); surplus > 0 {
		d := <-i.deliveries
		i.Errorf("%d more deliveries, the first is %.40q (%s) with %q: %v", surplus, d.id, d.body, d.metadata, d.err)
	}
	i.mustBeEmpty(i.queue)
}

func (i *instance) wantAttempts(want int) {
	i.Helper()
	i.lock.Lock()
	defer i.lock.Unlock()
	if len(i.attempts) != want {
		i.Errorf("%d attempts, want %d: %v", len(i.attempts), want, i.attempts)
	}
}

// wantLines checks how many messages the inbox has logged as such: processed, duplicate, failed.
func (i *instance) wantLines(outcome string, want int) {
	i.Helper()
	if got := i.log.count("Message " + outcome); got != want {
		i.Errorf("%d messages logged as %s, want %d", got, outcome, want)
	}
}

// write is a handler that has the message's id as its effect.
func (s *service) write(msg *message.Message) error { return s.db.Write(msg.Context(), msg.UUID) }

// waitInHandler waits for a signal of the test. A failed test, which gives none, ends it by closing the router.
func waitInHandler(msg *message.Message, signal <-chan struct{}) {
	select {
	case <-signal:
	case <-msg.Context().Done():
	}
}

func (s *service) effects() []string {
	s.Helper()
	effects, err := s.db.Effects(context.Background())
	if err != nil {
		s.Fatal(err)
	}
	slices.Sort(effects)
	return effects
}

// wantEffects checks what is committed: the effects, and a claim of the same id for each and for nothing else.
func (s *service) wantEffects(want ...string) {
	s.Helper()
	slices.Sort(want)
	if got := s.effects(); !slices.Equal(got, want) {
		s.Errorf("effects are %.500q, want %.500q", got, want)
	}
	if got := s.db.Count(s, `SELECT count(*) FROM watermill_inbox`); got != len(want) {
		s.Errorf("%d claims are committed, want %d", got, len(want))
	}
	if got := s.db.Count(s, `SELECT count(*) FROM watermill_inbox WHERE message_id NOT IN (SELECT effect FROM effects)`); got != 0 {
		s.Errorf("%d claims are without effect", got)
	}
}

// wantPoisoned removes all messages from the poison queue and checks their bodies and order.
func (s *service) wantPoisoned(bodies ...string) []amqp091.Delivery {
	s.Helper()
	poisoned := s.drain(s.poison)
	var got []string
	for _, d := range poisoned {
		got = append(got, string(d.Body))
	}
	if !slices.Equal(got, bodies) {
		s.Fatalf("the poison queue holds %.500q, want %.500q", got, bodies)
	}
	return poisoned
}

// drain removes all messages that are in a queue.
func (b *broker) drain(queue string) (all []amqp091.Delivery) {
	b.Helper()
	b.must(func(c *amqp091.Channel) error {
		for {
			d, ok, err := c.Get(queue, true)
			if err != nil || !ok {
				return err
			}
			all = append(all, d)
		}
	})
	return all
}

// publishAll puts messages into a queue and waits until the broker has them all.
func (b *broker) publishAll(queue string, all []amqp091.Publishing) {
	b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	b.must(func(c *amqp091.Channel) error {
		if err := c.Confirm(false); err != nil {
			return err
		}
		var confirmations []*amqp091.DeferredConfirmation
		for _, publishing := range all {
			confirmation, err := c.PublishWithDeferredConfirmWithContext(ctx, "", queue, false, false, publishing)
			if err != nil {
				return err
			}
			confirmations = append(confirmations, confirmation)
		}
		for _, confirmation := range confirmations {
			if confirmed, err := confirmation.WaitContext(ctx); err != nil || !confirmed {
				return errors.Join(errors.New("not confirmed"), err)
			}
		}
		return nil
	})
}

// waitForSessions waits until so many of the application's sessions are in a state, which only asking can tell.
func (s *service) waitForSessions(application, state string, want int) {
	s.Helper()
	got := -1
	for deadline := time.Now().Add(patience); got != want; time.Sleep(2 * time.Millisecond) {
		got = s.db.Count(s, `SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND `+state, application)
		if time.Now().After(deadline) {
			s.Fatalf("%d sessions of %s with %s, want %d", got, application, state, want)
		}
	}
}

const (
	inTransaction  = `state LIKE 'idle in transaction%'`
	waitsForALock  = `wait_event_type = 'Lock'`
	whateverItDoes = `true`
)

// wantNoOpenTransaction is for the end of a test. It looks once: what is rolled back by database/sql's own
// goroutine must have been waited for.
func (s *service) wantNoOpenTransaction(application string) {
	s.Helper()
	if got := s.db.Count(s, `SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND `+inTransaction, application); got != 0 {
		s.Errorf("%d sessions are idle in transaction", got)
	}
}

// lineLog counts the debug lines of the inbox.
type lineLog struct {
	watermill.NopLogger
	lock  sync.Mutex
	lines map[string]int
}

func (l *lineLog) Debug(msg string, _ watermill.LogFields) {
	l.lock.Lock()
	defer l.lock.Unlock()
	l.lines[msg]++
}

func (l *lineLog) With(watermill.LogFields) watermill.LoggerAdapter { return l }

func (l *lineLog) count(msg string) int {
	l.lock.Lock()
	defer l.lock.Unlock()
	return l.lines[msg]
}

// reason is why a message was poisoned.
func reason(d amqp091.Delivery) string {
	text, _ := d.Headers[middleware.ReasonForPoisonedKey].(string)
	return text
}

func wantReason(t testing.TB, d amqp091.Delivery, part string) {
	t.Helper()
	if got := reason(d); !strings.Contains(got, part) {
		t.Errorf("%s is poisoned because of %q, want %q in it", d.Body, got, part)
	}
}
