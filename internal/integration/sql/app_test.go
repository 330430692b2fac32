package sql_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
)

const patience = 30 * time.Second

// app is a service under test: a router with the documented publisher decorator and middleware order on an in-process
// broker that redelivers what is nacked, at once.
type app struct {
	t      testing.TB
	db     *testdb.Database
	broker *gochannel.GoChannel
	router *message.Router
	poison *recorder
	inbox  *inbox.Middleware

	cancel  context.CancelFunc
	stopped chan error
}

func newApp(t testing.TB, db *testdb.Database, repository inbox.Repository, options inbox.Options) *app {
	t.Helper()
	a := newForgetfulApp(t, db, repository, options)
	a.router.AddPublisherDecorators(a.inbox.DecoratePublisher)
	return a
}

// newForgetfulApp is an app without the publisher decorator, so that what its handlers return stays unsent.
func newForgetfulApp(t testing.TB, db *testdb.Database, repository inbox.Repository, options inbox.Options) *app {
	t.Helper()
	m, err := inbox.NewMiddleware(repository, options)
	if err != nil {
		t.Fatal(err)
	}
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: patience}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	return &app{
		t: t, db: db, router: router, inbox: m, poison: &recorder{}, stopped: make(chan error, 1),
		broker: gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{}),
	}
}

// order is the documented one.
func (a *app) order() []message.HandlerMiddleware {
	return []message.HandlerMiddleware{
		a.poisonQueue(), a.retry(3), middleware.Timeout(patience), middleware.Recoverer, a.inbox.Middleware,
	}
}

func (a *app) poisonQueue() message.HandlerMiddleware {
	a.t.Helper()
	m, err := middleware.PoisonQueueWithFilter(a.poison, "poison", inbox.ShouldPoison)
	if err != nil {
		a.t.Fatal(err)
	}
	return m
}

func (a *app) retry(times int) message.HandlerMiddleware {
	return middleware.Retry{
		MaxRetries: times, InitialInterval: time.Millisecond, Multiplier: 1,
		ShouldRetry: inbox.ShouldRetry, ResetContextOnRetry: true,
	}.Middleware
}

func (a *app) handle(name, topic string, handler message.NoPublishHandlerFunc) {
	a.router.AddConsumerHandler(name, topic, a.broker, handler)
}

// run starts the router; it is closed with the test, or before by stop.
func (a *app) run() {
	a.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	a.cancel = cancel
	go func() { a.stopped <- a.router.Run(ctx) }()
	<-a.router.Running()
	a.t.Cleanup(a.stop)
}

// stop closes the router and waits for it.
func (a *app) stop() {
	if a.cancel == nil {
		return
	}
	a.cancel()
	a.cancel = nil
	select {
	case err := <-a.stopped:
		if err != nil {
			a.t.Errorf("the router stopped with: %v", err)
		}
	case <-time.After(patience):
		a.t.Error("the router did not stop")
	}
	if err := a.broker.Close(); err != nil {
		a.t.Error(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := a.inbox.Close(ctx); err != nil {
		a.t.Error(err)
	}
}

// publish returns when all handlers of the topic have acknowledged.
func (a *app) publish(topic string, messages ...*message.Message) {
	a.t.Helper()
	done := make(chan error, 1)
	go func() { done <- a.broker.Publish(topic, messages...) }()
	select {
	case err := <-done:
		if err != nil {
			a.t.Fatal(err)
		}
	case <-time.After(patience):
		a.t.Fatalf("messages %v are not acknowledged", message.Messages(messages).IDs())
	}
}

func (a *app) wantEffects(want ...string) {
	a.t.Helper()
	got, err := a.db.Effects(context.Background())
	if err != nil {
		a.t.Fatal(err)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		a.t.Fatalf("effects are %q, want %q", got, want)
	}
}

func (a *app) wantClaims(want int) {
	a.t.Helper()
	if got := a.db.Count(a.t, `SELECT count(*) FROM watermill_inbox`); got != want {
		a.t.Fatalf("%d claims are committed, want %d", got, want)
	}
}

func (a *app) wantPoisoned(want ...string) []*message.Message {
	a.t.Helper()
	poisoned := a.poison.all()
	if got := message.Messages(poisoned).IDs(); !slices.Equal(got, want) {
		a.t.Fatalf("the poison queue holds %q, want %q", got, want)
	}
	return poisoned
}

func newMessage(id string) *message.Message { return message.NewMessage(id, []byte(id)) }

// recorder is a publisher that keeps what it is given.
type recorder struct {
	mutex    sync.Mutex
	messages []*message.Message
	fails    int // so many times
}

func (r *recorder) Publish(_ string, messages ...*message.Message) error {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.fails > 0 {
		r.fails--
		return errors.New("the broker refuses")
	}
	for _, msg := range messages {
		r.messages = append(r.messages, msg.Copy())
	}
	return nil
}

func (r *recorder) Close() error { return nil }

func (r *recorder) all() []*message.Message {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return slices.Clone(r.messages)
}

// eventually waits for what no signal tells: a state inside the database.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !is() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", patience, what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
