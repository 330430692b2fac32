package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
)

var oneHour = inbox.Retention{Default: time.Hour}

// failing fails its first deletion; the second one tells that the cleaner went on.
type failing struct {
	*inboxtest.MemoryRepository
	calls    atomic.Int32
	wentOn   chan struct{}
	deletion error
}

func (f *failing) Consumers(context.Context) ([]string, time.Time, error) {
	return []string{"consumer"}, time.Now(), nil
}

func (f *failing) DeleteProcessed(context.Context, inbox.DeleteProcessedParams) (int, time.Time, error) {
	switch f.calls.Add(1) {
	case 1:
		return 0, time.Time{}, f.deletion
	case 2:
		close(f.wentOn)
	}
	return 0, time.Time{}, nil
}

func (f *failing) CountRecords(_ context.Context, selection inbox.Selection) (int, error) {
	return map[bool]int{true: 3}[selection.Unsent], nil
}

// The cleaner is in nobody's way when the database is away: it says so and goes on with the next pass.
func TestCleanerGoesOnAfterAFailedPass(t *testing.T) {
	t.Parallel()
	logger := watermill.NewCaptureLogger()
	repository := &failing{wentOn: make(chan struct{}), deletion: errors.New("the database is away")}
	cleaner, err := inbox.NewCleaner(repository, inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: oneHour, Interval: time.Millisecond, Logger: logger})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- cleaner.Run(ctx) }()
	<-repository.wentOn
	cancel()
	if err := <-done; err != context.Canceled {
		t.Fatalf("Run returned %v", err)
	}
	if got := logger.Captured()[watermill.ErrorLogLevel]; len(got) != 1 || !errors.Is(got[0].Err, repository.deletion) {
		t.Fatalf("error lines %v", got)
	}
	for _, line := range logger.Captured()[watermill.InfoLogLevel] {
		if line.Fields["unsent"] != 3 {
			t.Fatalf("line %v does not count what is kept", line)
		}
	}
}

// slow has five hundred expired records and times out on large batches.
type slow struct {
	*inboxtest.MemoryRepository
	left    int
	largest int // that does not time out
	sizes   []int
}

func (s *slow) Consumers(context.Context) ([]string, time.Time, error) {
	return []string{"consumer"}, time.Now(), nil
}

func (s *slow) DeleteProcessed(_ context.Context, params inbox.DeleteProcessedParams) (int, time.Time, error) {
	s.sizes = append(s.sizes, params.Limit)
	if params.Limit > s.largest {
		return 0, time.Time{}, fmt.Errorf("after %s: %w", params.Timeout, inbox.ErrBatchTimeout)
	}
	deleted := min(params.Limit, s.left)
	s.left -= deleted
	return deleted, time.Time{}, nil
}

func TestCleanerMakesSmallerBatchesAfterATimeout(t *testing.T) {
	t.Parallel()
	options := inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: oneHour, BatchSize: 400, BatchPause: time.Nanosecond}
	for largest, want := range map[int]struct {
		sizes []int
		left  int
	}{
		400: {[]int{400, 400}, 0},
		150: {[]int{400, 200, 100, 100, 100, 100, 100, 100}, 0},
		5:   {[]int{400, 200, 100, 50, 25, 12, 10}, 500}, // the smallest fails as well
	} {
		records := &slow{MemoryRepository: inboxtest.NewMemoryRepository(), left: 500, largest: largest}
		cleaner, err := inbox.NewCleaner(records, options)
		if err != nil {
			t.Fatal(err)
		}
		pass, err := cleaner.Pass(context.Background())
		if (err != nil) != (want.left > 0) || pass.Deleted != 500-want.left || !slices.Equal(records.sizes, want.sizes) {
			t.Errorf("up to %d: %+v, %v, batches %v, want %v", largest, pass, err, records.sizes, want.sizes)
		}
	}
}

// several consumers share what a pass has learned.
type several struct {
	*slow
	consumers []string
}

func (s several) Consumers(context.Context) ([]string, time.Time, error) {
	return s.consumers, time.Now(), nil
}

func TestCleanerKeepsSmallerBatchesForTheRestOfThePass(t *testing.T) {
	t.Parallel()
	records := several{&slow{MemoryRepository: inboxtest.NewMemoryRepository(), left: 100, largest: 150}, []string{"a", "b"}}
	cleaner, err := inbox.NewCleaner(records, inbox.CleanerOptions{
		Consumers: inbox.AllConsumers(), Retention: oneHour, BatchSize: 200, BatchPause: time.Nanosecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cleaner.Pass(context.Background()); err != nil {
		t.Fatal(err)
	}
	if want := []int{200, 100, 100, 100}; !slices.Equal(records.sizes, want) {
		t.Errorf("batches %v, want %v", records.sizes, want)
	}
}

// undeletable is a table whose policy lets nobody delete.
type undeletable struct {
	*inboxtest.MemoryRepository
	deletions int
}

func (u *undeletable) DeleteUnsent(context.Context, []inbox.Record) (int, error) {
	u.deletions++
	return 0, nil
}

func TestCleanerSaysThatUnsentMessagesStay(t *testing.T) {
	t.Parallel()
	records := &undeletable{MemoryRepository: inboxtest.NewMemoryRepository()}
	key := inbox.Key{Consumer: "consumer", MessageID: "1"}
	commitUnsent(t, records, key)
	records.Age(key, 3*time.Hour)
	cleaner, err := inbox.NewCleaner(records, inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: oneHour, UnsentRetention: 2 * time.Hour, BatchPause: time.Nanosecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if pass, err := cleaner.Pass(ctx); err == nil || ctx.Err() != nil || pass != (inbox.CleanerPass{Deleted: 1, Unsent: 1}) || records.deletions != 2 {
		t.Errorf("%+v, %v, after %d deletions", pass, err, records.deletions)
	}
}

// stuck waits for a lock that somebody has forgotten.
type stuck struct{ *inboxtest.MemoryRepository }

func (stuck) DeleteUnsent(ctx context.Context, _ []inbox.Record) (int, error) {
	<-ctx.Done()
	return 0, ctx.Err()
}

func (stuck) FindRecords(_ context.Context, _ inbox.Selection, _ inbox.Record, _ int) ([]inbox.Record, error) {
	return []inbox.Record{{Key: inbox.Key{Consumer: "consumer", MessageID: "1"}}}, nil
}

func (stuck) Consumers(context.Context) ([]string, time.Time, error) {
	return []string{"consumer"}, time.Now(), nil
}

func TestCleanerBoundsTheDeletionOfUnsentRecords(t *testing.T) {
	t.Parallel()
	cleaner, err := inbox.NewCleaner(stuck{inboxtest.NewMemoryRepository()}, inbox.CleanerOptions{
		Consumers: inbox.AllConsumers(), Retention: oneHour, UnsentRetention: time.Hour, BatchTimeout: 10 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if _, err := cleaner.Pass(ctx); err == nil || ctx.Err() != nil {
		t.Errorf("%v, and the test's context: %v", err, ctx.Err())
	}
}

// counted tells how often it is asked.
type counted struct {
	*inboxtest.MemoryRepository
	passes *atomic.Int32
}

func (c counted) Consumers(context.Context) ([]string, time.Time, error) {
	c.passes.Add(1)
	return nil, time.Now(), nil
}

func TestCleanerPausesForTheLongestInterval(t *testing.T) {
	t.Parallel()
	var passes atomic.Int32
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	const cleaners = 20 // the pause varies
	done := make(chan error)
	for range cleaners {
		cleaner, err := inbox.NewCleaner(counted{inboxtest.NewMemoryRepository(), &passes}, inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: oneHour, Interval: math.MaxInt64})
		if err != nil {
			t.Fatal(err)
		}
		go func() { done <- cleaner.Run(ctx) }()
	}
	for range cleaners {
		<-done
	}
	if got := passes.Load(); got != cleaners {
		t.Errorf("%d passes of %d cleaners", got, cleaners)
	}
}

// clock is a database whose clock is not ours.
type clock struct {
	*inboxtest.MemoryRepository
	ahead time.Duration
}

func (c clock) Consumers(context.Context) ([]string, time.Time, error) {
	return []string{"consumer"}, time.Now().Add(c.ahead), nil
}

func (c clock) DeleteProcessed(context.Context, inbox.DeleteProcessedParams) (int, time.Time, error) {
	return 0, time.Time{}, nil
}

func TestCleanerTrustsNoClockThatHasJumped(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		retention, ahead time.Duration
		refused          bool
	}{
		{time.Hour, 0, false},
		{time.Hour, 14 * time.Minute, false},
		{time.Hour, -14 * time.Minute, false},
		{time.Hour, 16 * time.Minute, true},
		{time.Hour, -16 * time.Minute, true},
		{time.Second, 30 * time.Second, false},
		{time.Second, 2 * time.Minute, true},
		{24 * time.Hour, 59 * time.Minute, false},
		{24 * time.Hour, 61 * time.Minute, true},
		{24 * time.Hour, 1000 * 24 * time.Hour, true},
	} {
		records := clock{ahead: c.ahead, MemoryRepository: inboxtest.NewMemoryRepository()}
		cleaner, err := inbox.NewCleaner(records, inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: inbox.Retention{
			Default: inbox.KeepForever, Consumers: map[string]time.Duration{"consumer": c.retention},
		}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := cleaner.Pass(context.Background()); (err != nil) != c.refused {
			t.Errorf("retention %s, %s ahead: %v", c.retention, c.ahead, err)
		}
	}
}

// jumping is a database whose clock jumps a day ahead when a pass has begun.
type jumping struct {
	*inboxtest.MemoryRepository
	batches []time.Time
}

func (j *jumping) Consumers(context.Context) ([]string, time.Time, error) {
	return []string{"a", "b"}, time.Now(), nil
}

func (j *jumping) DeleteProcessed(_ context.Context, params inbox.DeleteProcessedParams) (int, time.Time, error) {
	j.batches = append(j.batches, params.Before)
	return 0, time.Time{}, nil
}

// One time decides for a whole pass, which may take hours.
func TestCleanerTrustsNoClockThatJumpsDuringAPass(t *testing.T) {
	t.Parallel()
	records := &jumping{MemoryRepository: inboxtest.NewMemoryRepository()}
	cleaner, err := inbox.NewCleaner(records, inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: oneHour})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cleaner.Pass(context.Background()); err != nil {
		t.Fatal(err)
	}
	if len(records.batches) != 2 || !records.batches[0].Equal(records.batches[1]) {
		t.Errorf("records before %s are deleted", records.batches)
	}
}

// many is a table with more expired records than a batch takes; each batch is a minute younger.
type many struct {
	*inboxtest.MemoryRepository
	batches int
	from    []time.Time
}

var oldest = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func (m *many) Consumers(context.Context) ([]string, time.Time, error) {
	return []string{"consumer"}, time.Now(), nil
}

func (m *many) DeleteProcessed(_ context.Context, params inbox.DeleteProcessedParams) (int, time.Time, error) {
	m.from = append(m.from, params.From)
	if len(m.from) > m.batches {
		return 0, time.Time{}, nil
	}
	return params.Limit, oldest.Add(time.Duration(len(m.from)) * time.Minute), nil
}

// A batch does not look again at what those before it have deleted: beside an old snapshot the database would step
// over all of it each time.
func TestCleanerGoesOnFromTheLastRecord(t *testing.T) {
	t.Parallel()
	records := &many{MemoryRepository: inboxtest.NewMemoryRepository(), batches: 2}
	cleaner, err := inbox.NewCleaner(records, inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: oneHour, BatchPause: time.Nanosecond})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cleaner.Pass(context.Background()); err != nil {
		t.Fatal(err)
	}
	want := []time.Time{oldest, oldest.Add(time.Minute), oldest.Add(2 * time.Minute)}
	if !slices.EqualFunc(records.from, want, time.Time.Equal) {
		t.Errorf("batches go on from %s, want %s", records.from, want)
	}
}

// oneFails is a table with a consumer whose records cannot be deleted.
type oneFails struct {
	*inboxtest.MemoryRepository
	others int
}

func (o *oneFails) Consumers(context.Context) ([]string, time.Time, error) {
	return []string{"a", "b"}, time.Now(), nil
}

func (o *oneFails) DeleteProcessed(_ context.Context, params inbox.DeleteProcessedParams) (int, time.Time, error) {
	if params.Consumer == "a" {
		return 0, time.Time{}, errors.New("cannot delete")
	}
	o.others++
	return 0, time.Time{}, nil
}

func TestCleanerGoesOnWithOtherConsumers(t *testing.T) {
	t.Parallel()
	records := &oneFails{MemoryRepository: inboxtest.NewMemoryRepository()}
	cleaner, err := inbox.NewCleaner(records, inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: oneHour})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cleaner.Pass(context.Background()); err == nil {
		t.Error("no error")
	}
	if records.others == 0 {
		t.Error("one consumer keeps the others from being cleaned")
	}
}

// busy is a table on which another cleaner is at work after the first batch.
type busy struct {
	*inboxtest.MemoryRepository
	batches int
}

func (b *busy) Consumers(context.Context) ([]string, time.Time, error) {
	return []string{"consumer"}, time.Now(), nil
}

func (b *busy) DeleteProcessed(_ context.Context, params inbox.DeleteProcessedParams) (int, time.Time, error) {
	if b.batches++; b.batches > 1 {
		return 0, time.Time{}, fmt.Errorf("cannot delete: %w", inbox.ErrCleaning)
	}
	return params.Limit, time.Time{}, nil
}

func TestCleanerYields(t *testing.T) {
	t.Parallel()
	cleaner, err := inbox.NewCleaner(&busy{MemoryRepository: inboxtest.NewMemoryRepository()}, inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: oneHour, BatchSize: 7})
	if err != nil {
		t.Fatal(err)
	}
	if pass, err := cleaner.Pass(context.Background()); err != nil || pass != (inbox.CleanerPass{Deleted: 7, Yielded: true}) {
		t.Errorf("%+v, %v", pass, err)
	}
}

// uncountable has an expired record, and counts longer than any patience.
type uncountable struct{ *inboxtest.MemoryRepository }

func (uncountable) CountRecords(ctx context.Context, _ inbox.Selection) (int, error) {
	<-ctx.Done()
	return 0, ctx.Err()
}

func TestCleanerDeletesThoughItCannotCount(t *testing.T) {
	t.Parallel()
	records := uncountable{inboxtest.NewMemoryRepository()}
	key := inbox.Key{Consumer: "consumer", MessageID: "1"}
	commitUnsent(t, records.MemoryRepository, key)
	records.Age(key, 3*time.Hour)
	cleaner, err := inbox.NewCleaner(records, inbox.CleanerOptions{
		Consumers: inbox.AllConsumers(), Retention: oneHour, UnsentRetention: 2 * time.Hour, BatchTimeout: 10 * time.Millisecond, BatchPause: time.Nanosecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if pass, err := cleaner.Pass(ctx); !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil || pass != (inbox.CleanerPass{Deleted: 1, UnsentDeleted: 1}) {
		t.Errorf("%+v, %v, and the test's context: %v", pass, err, ctx.Err())
	}
}

// commitUnsent processes a message that returns one, which stays unsent.
func commitUnsent(t *testing.T, repository inbox.Repository, key inbox.Key) {
	t.Helper()
	transaction, _, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: key})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := transaction.Store(context.Background(), inbox.StoreParams{Topic: "events", Produced: []byte("unsent")}); err != nil {
		t.Fatal(err)
	}
	if err := transaction.Commit(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// lingering is a table on which a batch that was cancelled holds the cleaners' lock for a moment.
type lingering struct {
	*inboxtest.MemoryRepository
	answers []error
}

func (l *lingering) Consumers(context.Context) ([]string, time.Time, error) {
	return []string{"consumer"}, time.Now(), nil
}

func (l *lingering) DeleteProcessed(context.Context, inbox.DeleteProcessedParams) (int, time.Time, error) {
	answer := l.answers[0]
	l.answers = l.answers[1:]
	return 0, time.Time{}, answer
}

func TestCleanerDoesNotYieldToItself(t *testing.T) {
	t.Parallel()
	records := &lingering{inboxtest.NewMemoryRepository(), []error{inbox.ErrBatchTimeout, inbox.ErrCleaning, inbox.ErrCleaning, nil}}
	cleaner, err := inbox.NewCleaner(records, inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: oneHour})
	if err != nil {
		t.Fatal(err)
	}
	if pass, err := cleaner.Pass(context.Background()); err != nil || pass.Yielded || len(records.answers) != 0 {
		t.Errorf("%+v, %v, %d answers are left", pass, err, len(records.answers))
	}
}

func (u *undeletable) DeleteRecords(context.Context, []inbox.Record) (int, error) { return 0, nil }

func TestForgetSaysThatRecordsStay(t *testing.T) {
	t.Parallel()
	records := &undeletable{MemoryRepository: inboxtest.NewMemoryRepository()}
	commitUnsent(t, records, inbox.Key{Consumer: "consumer", MessageID: "1"})
	if deleted, err := inbox.Forget(context.Background(), records, inbox.Selection{Consumer: "consumer"}, 1); err == nil || deleted != 0 {
		t.Errorf("%d deleted, %v", deleted, err)
	}
}

// raced is a table of which somebody else deletes a record after it was found.
type raced struct{ *inboxtest.MemoryRepository }

func (r raced) DeleteRecords(ctx context.Context, found []inbox.Record) (int, error) {
	if _, err := r.MemoryRepository.DeleteRecords(ctx, found[:1]); err != nil {
		return 0, err
	}
	return r.MemoryRepository.DeleteRecords(ctx, found)
}

func TestForgetIsNotAlarmedByAnother(t *testing.T) {
	t.Parallel()
	records := raced{inboxtest.NewMemoryRepository()}
	for _, id := range []string{"1", "2"} {
		commitUnsent(t, records, inbox.Key{Consumer: "consumer", MessageID: id})
	}
	if deleted, err := inbox.Forget(context.Background(), records, inbox.Selection{Consumer: "consumer"}, 2); err != nil || deleted != 1 {
		t.Errorf("%d deleted, %v", deleted, err)
	}
}

// leasedOnce keeps unsent messages from their first deletion, as a lease at the same moment does.
type leasedOnce struct {
	*inboxtest.MemoryRepository
	leased bool
}

func (l *leasedOnce) DeleteUnsent(ctx context.Context, found []inbox.Record) (int, error) {
	if !l.leased {
		l.leased = true
		found = found[1:]
	}
	return l.MemoryRepository.DeleteUnsent(ctx, found)
}

func TestCleanerDeletesUnsentMessagesThatARelayLeases(t *testing.T) {
	t.Parallel()
	records := &leasedOnce{MemoryRepository: inboxtest.NewMemoryRepository()}
	for _, id := range []string{"1", "2"} {
		key := inbox.Key{Consumer: "consumer", MessageID: id}
		commitUnsent(t, records, key)
		records.Age(key, 3*time.Hour)
	}
	cleaner, err := inbox.NewCleaner(records, inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: oneHour, UnsentRetention: 2 * time.Hour, BatchPause: time.Nanosecond})
	if err != nil {
		t.Fatal(err)
	}
	if pass, err := cleaner.Pass(context.Background()); err != nil || pass != (inbox.CleanerPass{Deleted: 2, UnsentDeleted: 2}) {
		t.Errorf("%+v, %v", pass, err)
	}
}

// A name that may be wrong is said once; before there are records none is.
func TestCleanerDoubtsAName(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		claimed []string
		want    int
	}{
		"the first deploy":              {nil, 0},
		"all have their own retention":  {[]string{"refund"}, 0},
		"it has records":                {[]string{"charge", "other"}, 0},
		"another name has records":      {[]string{"chrage"}, 1},
		"somebody else's name has some": {[]string{"foreign"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			repository := inboxtest.NewMemoryRepository()
			for _, consumer := range c.claimed {
				transaction, _, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: consumer, MessageID: "1"}})
				if err == nil {
					err = transaction.Commit(context.Background())
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			logger := watermill.NewCaptureLogger()
			cleaner, err := inbox.NewCleaner(repository, inbox.CleanerOptions{
				Consumers: inbox.NamedConsumers("charge", "refund", "chrage", "other"),
				Retention: inbox.Retention{Default: time.Hour, Consumers: map[string]time.Duration{"charge": inbox.KeepForever, "refund": inbox.KeepForever}},
				Logger:    logger,
			})
			if err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if _, err := cleaner.Pass(context.Background()); err != nil {
					t.Fatal(err)
				}
			}
			said := 0
			for _, line := range logger.Captured()[watermill.ErrorLogLevel] {
				if line.Fields["consumer"] == "charge" {
					said++
				}
			}
			if said != c.want {
				t.Fatalf("it is said %d times, want %d", said, c.want)
			}
		})
	}
}
